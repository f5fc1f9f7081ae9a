"""Each gateway process on one core of its own, where TOLLHOUSE_PIN_WORKERS says so.

One interpreter runs one thread at a time. Spread over the cores, its threads hand it from one to
another, and each that gets it finds another core's caches.
"""

import contextlib
import logging
import os
from collections.abc import Iterator

log = logging.getLogger("tollhouse.workers")
_all_cores: set[int] = set()  # what this process might use before it kept to one; empty: it did not


def keep_to_one(place: int) -> None:
    """Worker `place` (from 0) to that core from the last; more workers than cores begin anew.

    The system keeps cores by thread, and a thread has those of the one that made it: this is for
    the main thread, before there are others.
    """
    global _all_cores
    if not hasattr(os, "sched_setaffinity"):
        log.warning("TOLLHOUSE_PIN_WORKERS does nothing here: this system gives no cores to choose")
        return
    _all_cores = os.sched_getaffinity(0)
    cores = sorted(_all_cores, reverse=True)
    os.sched_setaffinity(0, {cores[place % len(cores)]})


@contextlib.contextmanager
def as_for_children() -> Iterator[None]:
    """For the start of a process: it gets the cores that this thread has meanwhile, which are all."""
    if not _all_cores:
        yield
        return
    kept = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _all_cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, kept)
