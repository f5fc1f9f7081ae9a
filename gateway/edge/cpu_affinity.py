"""CPU affinity: pins each gateway process to one core where TOLLHOUSE_PIN_WORKERS is set.

An interpreter runs one thread at a time. With its threads spread over several cores, each switch
moves to a core whose caches are cold.
"""

import contextlib
import logging
import os
from collections.abc import Iterator

log = logging.getLogger("tollhouse.workers")
_all_cores: set[int] = set()  # the cores available before pinning; empty: not pinned


def pin_to_core(index: int) -> None:
    """Pin worker `index` (from 0) to a core, counted from the last one; the count wraps around.

    Affinity belongs to a thread and is inherited, so call this in the main thread before any other
    thread starts.
    """
    global _all_cores
    if not hasattr(os, "sched_setaffinity"):
        log.warning("TOLLHOUSE_PIN_WORKERS is ignored: this system has no sched_setaffinity")
        return
    _all_cores = os.sched_getaffinity(0)
    cores = sorted(_all_cores, reverse=True)
    os.sched_setaffinity(0, {cores[index % len(cores)]})


@contextlib.contextmanager
def all_cores_for_children() -> Iterator[None]:
    """Restore all cores while a child process starts, since it inherits this thread's affinity."""
    if not _all_cores:
        yield
        return
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _all_cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, pinned)
