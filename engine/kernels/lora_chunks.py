"""Sorting a step's rows by adapter slot and cutting them into chunks, on the host."""

import torch
from torch import Tensor


def chunk_rows_for(tokens: int) -> int:
    """Few rows a chunk while decoding, where they are bound by memory; more for prompts."""
    return 16 if tokens <= 256 else 64


def most_chunks(tokens: int, adapters: int, chunk_rows: int) -> int:
    """A bound that holds for any mix: every adapter fills all its chunks but one."""
    return min(tokens, adapters + tokens // chunk_rows)


def sort_into_chunks(slots: Tensor, chunk_rows: int) -> tuple[Tensor, Tensor]:
    """`slots` is [tokens], -1 for no adapter; all on the host. Gives the rows that use an adapter
    sorted by slot (stable), and [chunks, 3]: slot, first place in that order, count."""
    order = torch.argsort(slots, stable=True)
    order = order[int((slots < 0).sum()) :]
    used, counts = torch.unique_consecutive(slots[order], return_counts=True)
    pieces = (counts + chunk_rows - 1) // chunk_rows
    owner = torch.repeat_interleave(pieces)  # which adapter each chunk belongs to
    nth = torch.arange(len(owner)) - (pieces.cumsum(0) - pieces)[owner]
    first = (counts.cumsum(0) - counts)[owner] + nth * chunk_rows
    held = torch.minimum(counts[owner] - nth * chunk_rows, torch.tensor(chunk_rows))
    return order.int(), torch.stack((used[owner].long(), first, held), 1).int()
