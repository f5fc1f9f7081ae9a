"""Sorts a step's rows by adapter slot and cuts them into chunks, on the host."""

import torch
from torch import Tensor


def chunk_rows_for(tokens: int) -> int:
    """Rows per chunk: few while decoding, which is bound by memory; more for prompts."""
    return 16 if tokens <= 256 else 64


def max_chunks(tokens: int, adapters: int, chunk_rows: int) -> int:
    """The most chunks for any mix of adapters: each adapter has at most one partly filled chunk."""
    return min(tokens, adapters + tokens // chunk_rows)


def sort_into_chunks(slots: Tensor, chunk_rows: int) -> tuple[Tensor, Tensor]:
    """`slots` is [tokens], -1 for no adapter, on the host. Returns the rows that use an adapter,
    sorted by slot (stable), and [chunks, 3]: slot, first index in that order, count."""
    order = torch.argsort(slots, stable=True)
    order = order[int((slots < 0).sum()) :]
    used, counts = torch.unique_consecutive(slots[order], return_counts=True)
    pieces = (counts + chunk_rows - 1) // chunk_rows
    owner = torch.repeat_interleave(pieces)  # the adapter of each chunk
    nth = torch.arange(len(owner)) - (pieces.cumsum(0) - pieces)[owner]
    first = (counts.cumsum(0) - counts)[owner] + nth * chunk_rows
    held = torch.minimum(counts[owner] - nth * chunk_rows, torch.tensor(chunk_rows))
    return order.int(), torch.stack((used[owner].long(), first, held), 1).int()
