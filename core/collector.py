"""Python's search for objects in cycles, spared while modules are imported.

Modules stay for good, so that a search among them finds nothing; while a command imports some
hundreds of them, one in five of its milliseconds went there.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# New objects between two searches: a request makes hundreds, hardly any in a cycle.
_RARE = (20_000, 20, 20)


@contextmanager
def paused() -> Iterator[None]:
    """No search meanwhile; afterwards as before, also where an import fails."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def rarer() -> Iterator[None]:
    """Fewer searches while a command runs, which imports and makes much that stays until its end."""
    before = gc.get_threshold()
    gc.set_threshold(*_RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def spare_all() -> None:
    """What a start made lives as long as the process: leave it out of all later searches."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_RARE)
