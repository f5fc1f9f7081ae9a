"""All ranks of a group in one process, a thread each."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from engine.backends.compiled.group import Group, group_bytes

Found = TypeVar("Found")


def on_ranks(size: int, work: Callable[[Group], Found], patience_s: float = 60.0) -> list[Found]:
    """What `work` returns on each rank; the first error, after all ranks have ended."""
    memory = np.zeros(group_bytes(size), np.uint8)

    def run(rank: int) -> Found:
        group = Group(memory, rank, size, patience_s)
        try:
            return work(group)
        except BaseException as error:
            group.end(f"rank {rank}: {error}")
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for each in futures if (error := each.exception()) is not None]
    own = [error for error in errors if "ended the group" not in str(error)]
    if errors:
        raise (own or errors)[0]
    return [each.result() for each in futures]
