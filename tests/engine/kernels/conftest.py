"""Without a GPU the kernels run in Triton's interpreter; the switch must come before the import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
