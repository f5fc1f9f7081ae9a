"""Host memory: pages allocated when first written, released on demand, and huge pages."""

import ctypes
import math
import mmap
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_MADV_DONTNEED = 4
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
_LARGE = 1 << 30
_HUGE = 2 << 20
_MAX_COLLAPSED = 4 << 30


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, huge: bool = False) -> torch.Tensor:
    """Zeros that use memory only where they are written; in huge pages if `huge`."""
    # Private: shared mappings get no huge pages and cannot be released by MADV_DONTNEED.
    private = (
        {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    )
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, **private)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def release(tensor: torch.Tensor) -> None:
    """Returns the whole memory pages inside a contiguous `lazy_zeros` slice to the system.

    They read as zeros afterwards; the partial pages at both ends keep their content.
    """
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
    if end > start:
        _advise(start, end - start, _MADV_DONTNEED)


def keep_freed_memory() -> None:
    """Tells glibc to reuse freed buffers instead of returning each one to the system.

    A step allocates and frees the same large buffers in every layer. By default each allocation
    gets fresh pages, and faulting them in costs up to ten times the work done on them.
    """
    libc = _libc()
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGE)


def collapse_into_huge_pages() -> None:
    """Moves large buffers, above all the weights, into huge pages where the kernel supports it.

    Decoding one row reads every weight once, in order, and the processor stops prefetching at each
    page's end. Copying takes about a second per gigabyte, so at most 4 GiB are moved.
    """
    remaining = _MAX_COLLAPSED
    for start, end in _private_memory():
        low, high = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
        size = min(high - low, remaining)
        if size >= 8 * _HUGE:
            remaining -= size
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                _advise(low, size, advice)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _advise(start: int, size: int, advice: int) -> None:
    """Calls madvise, where the system has it; errors are ignored."""
    if hasattr(_libc(), "madvise"):
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


def _private_memory() -> list[tuple[int, int]]:
    """(start, end) of this process's private writable memory: the heap and anonymous mappings."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    found = []
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if fields[1].startswith("rw-p") and (len(fields) < 6 or fields[5] == "[heap]"):
            start, _, end = fields[0].partition("-")
            found.append((int(start, 16), int(end, 16)))
    return found
