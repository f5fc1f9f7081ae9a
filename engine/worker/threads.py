"""How long the worker's threads spin while they wait for each other."""

import os

# About 50 µs: longer than the pause between two products of a step. The library's own 300,000 keep
# a core busy for 15 ms, which other programs then lack; the README has the measurements.
SPIN_COUNT = "1000"


def bound_spinning() -> None:
    """Call it before torch is imported, whose OpenMP library reads the environment once."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
