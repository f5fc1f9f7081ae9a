"""What the launches of several kernels work out alike."""

import torch
from torch import Tensor


def power_of_two(n: int) -> int:
    """The smallest that is not below `n`."""
    return 1 << (n - 1).bit_length()


def precision(x: Tensor) -> str:
    """Of products: exact for float32, which tensor cores would cut down."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
