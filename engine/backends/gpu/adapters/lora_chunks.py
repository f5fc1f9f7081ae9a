"""Sorts a step's rows by adapter slot and cuts them into chunks, on the host."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]


def chunk_rows_for(tokens: int) -> int:
    """Rows per chunk: few while decoding, which is bound by memory; more for prompts."""
    return 16 if tokens <= 256 else 64


def max_chunks(tokens: int, adapters: int, chunk_rows: int) -> int:
    """The most chunks for any mix of adapters: each adapter has at most one partly filled chunk."""
    return min(tokens, adapters + tokens // chunk_rows)


def chunk_of_rows(order: Ints, chunks: Ints, tokens: int) -> NDArray[np.int32]:
    """The chunk of each row, -1 where it uses no adapter. Either may be padded."""
    found = np.full(tokens, -1, np.int32)
    counts = chunks[:, 2]
    found[order[: counts.sum()]] = np.repeat(np.arange(len(chunks)), counts)
    return found


def sort_into_chunks(slots: Ints, chunk_rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`slots` is [tokens], -1 for no adapter. Returns the rows that use an adapter, sorted by slot
    (stable), and [chunks, 3]: slot, first index in that order, count."""
    order = np.argsort(slots, kind="stable")[np.count_nonzero(slots < 0) :]
    used, first, counts = np.unique(slots[order], return_index=True, return_counts=True)
    pieces = -(-counts // chunk_rows)
    owner = np.repeat(np.arange(len(used)), pieces)  # the adapter of each chunk
    nth = np.arange(len(owner)) - (np.cumsum(pieces) - pieces)[owner]
    held = np.minimum(counts[owner] - nth * chunk_rows, chunk_rows)
    chunks = np.stack((used[owner], first[owner] + nth * chunk_rows, held), 1)
    return order.astype(np.int32), chunks.astype(np.int32)
