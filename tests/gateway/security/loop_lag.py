"""Measures how long an event loop in another thread was kept from running its callbacks."""

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY_S = 0.002
_GC_THRESHOLD = 50_000


@contextmanager
def as_served() -> Iterator[None]:
    """The interpreter as the server sets it: short turns of threads, and no garbage collector that
    looks over everything that the tests have imported."""
    before, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(0.0005)
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.set_threshold(*thresholds)


@contextmanager
def lag_of(loop: asyncio.AbstractEventLoop) -> Iterator[Callable[[], float]]:
    """Yields a function that tells the longest pause so far, in seconds, less what the loop's thread
    waited for a core that other processes had."""
    worst = [0.0]
    stop = threading.Event()

    async def _probe() -> None:
        last, queued = time.perf_counter(), _queued_s()
        while not stop.is_set():
            await asyncio.sleep(_EVERY_S)
            now, waited = time.perf_counter(), _queued_s()
            worst[0] = max(worst[0], now - last - _EVERY_S - (waited - queued))
            last, queued = now, waited

    probing = asyncio.run_coroutine_threadsafe(_probe(), loop)
    try:
        yield lambda: worst[0]
    finally:
        stop.set()
        probing.result(60)


def _queued_s() -> float:
    """For how long this thread was ready to run and had no core (Linux; elsewhere 0)."""
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


def longest_pause(loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> float:
    with lag_of(loop) as lag:
        work()
        time.sleep(10 * _EVERY_S)
        return lag()
