"""Keeps a gateway process's memory small and flat, whatever sizes of requests it has served.

glibc's malloc makes an arena of 64 MiB and more for each of many threads, and returns little of what
large requests leave behind. Fewer threads, few arenas, and a trim when the process is idle bound it.
Elsewhere than on glibc only the threads are bounded.
"""

import asyncio
import ctypes
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import anyio.to_thread

log = logging.getLogger("tollhouse.memory")
TRIM_EVERY_S = 20.0
_ARENAS = 2
_M_ARENA_MAX = -8  # malloc.h
_M_TRIM_THRESHOLD, _TRIM_THRESHOLD = -1, 32 << 20  # free bytes at the top of the heap


def bound_arenas() -> bool:
    """Call it before threads start. False where the allocator is not glibc's."""
    libc = _glibc()
    if libc is None:
        return False
    arenas = bool(libc.mallopt(_M_ARENA_MAX, _ARENAS))
    return bool(libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)) and arenas


def thread_count() -> int:
    return min(8, (os.cpu_count() or 1) + 2)


def bound_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Bound the threads of `asyncio.to_thread` and of FastAPI's synchronous routes."""
    pool = ThreadPoolExecutor(thread_count(), thread_name_prefix="tollhouse-work")
    loop.set_default_executor(pool)
    anyio.to_thread.current_default_thread_limiter().total_tokens = thread_count()


async def trim_when_idle(in_flight: Callable[[], int]) -> None:
    """Return freed memory to the system while no request runs, until cancelled."""
    libc = _glibc()
    while libc is not None:
        await asyncio.sleep(TRIM_EVERY_S)
        if not in_flight():
            await asyncio.to_thread(libc.malloc_trim, 0)


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        version = libc.gnu_get_libc_version
    except (OSError, AttributeError):
        return None
    version.restype = ctypes.c_char_p
    log.debug("the allocator is glibc %s", version())
    return libc
