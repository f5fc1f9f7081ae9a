"""What the worker sets for its process: how its threads wait, and how it imports."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

# How long threads spin while they wait for each other.
# About 50 µs: longer than the pause between two products of a step. The library's own 300,000 keep
# a core busy for 15 ms, which other programs then lack; the README has the measurements.
SPIN_COUNT = "1000"


def bound_spinning() -> None:
    """Call it before torch is imported, whose OpenMP library reads the environment once."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


@contextmanager
def uncollected() -> Iterator[None]:
    """No search for objects in cycles: PyTorch's modules stay for good, and it would find none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
