"""Memory on a CPU: pages taken when first written, given back on demand, and kept when reused."""

import ctypes
import math
import mmap

import torch

_MADV_DONTNEED = 4
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGE = 1 << 30


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only where they are written."""
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)


def release(tensor: torch.Tensor) -> None:
    """Hands the whole memory pages inside a contiguous `lazy_zeros` slice back.

    They read as zeros afterwards; the partial pages at both ends keep what they held.
    """
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
    libc = ctypes.CDLL(None)
    if end > start and hasattr(libc, "madvise"):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def keep_freed_memory() -> None:
    """Tells glibc to reuse freed buffers instead of returning each one to the system.

    A step makes and frees the same large buffers in every layer; by default each comes as fresh
    pages, and faulting them in costs up to ten times the work done on them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGE)
