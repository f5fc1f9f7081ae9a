"""Helpers for kernel launches."""

from functools import cache

import torch
from torch import Tensor

MAX_ROWS = 16  # of the products of few rows
_HOPPER = 90


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()


def precision(x: Tensor) -> str:
    """The precision of products: "ieee" for float32, which tensor cores would round to TF32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


@cache
def capability() -> int:
    """The device's compute capability, ten times: 80 is an A100. Without a device, Hopper's."""
    if not torch.cuda.is_available():
        return _HOPPER
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
