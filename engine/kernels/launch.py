"""Helpers for kernel launches."""

import torch
from torch import Tensor


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()


def precision(x: Tensor) -> str:
    """The precision of products: "ieee" for float32, which tensor cores would round to TF32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
