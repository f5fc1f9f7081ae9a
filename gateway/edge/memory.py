"""Keeps a gateway process's memory small and flat, whatever sizes of requests it has served.

glibc's malloc makes an arena of 64 MiB and more for each of many threads, and returns little of what
large requests leave behind: the tokens of a prompt of 1 MB are some 100 MB of small blocks. Fewer
threads, few arenas, and trims whenever the process has grown or is idle bound it. Elsewhere than on
glibc only the threads are bounded.
"""

import asyncio
import ctypes
import logging
import mmap
import os
import time
from collections.abc import Callable

import anyio.to_thread

from gateway.edge.threads import TenantThreads, Work, run_as

log = logging.getLogger("tollhouse.memory")
IDLE_TRIM_S = 20.0
# A trim holds the arenas' locks for about 0.1 ms for each MiB that it returns, and may make the event
# loop wait so long: often and little, rather than seldom and much.
_LOOK_EVERY_S = 0.5
_GROWTH = 8 << 20  # resident bytes since the last trim
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
    pool = TenantThreads(thread_count(), thread_name_prefix="tollhouse-work")
    loop.set_default_executor(pool)
    anyio.to_thread.current_default_thread_limiter().total_tokens = thread_count()


async def keep_trimmed(in_flight: Callable[[], int]) -> None:
    """Return freed memory to the system, until cancelled: when the process has grown, and from time
    to time while no request runs."""
    libc = _glibc()
    low, trimmed_at = _resident(), time.monotonic()
    while libc is not None:
        await asyncio.sleep(_LOOK_EVERY_S)
        low = min(low, now := _resident())
        is_due = time.monotonic() - trimmed_at > IDLE_TRIM_S and not in_flight()
        if is_due or now - low > _GROWTH:
            await run_as(Work.OWN, libc.malloc_trim, 0)
            low, trimmed_at = _resident(), time.monotonic()


def _resident() -> int:
    """Bytes; 0 if the system does not report them."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        version = libc.gnu_get_libc_version
    except (OSError, AttributeError):
        return None
    version.restype = ctypes.c_char_p
    log.debug("the allocator is glibc %s", version())
    return libc
