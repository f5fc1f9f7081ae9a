"""Segmented LoRA in plain torch, one chunk after another, and the records that the kernels take."""

from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = 64  # elements that one count of the row table stands for: 32 bits reach 128 G elements


@dataclass(frozen=True, slots=True)
class LoraSite:
    """One linear of one layer, or several over the same input whose outputs lie side by side (its
    slices). `rows[slot, slice, 0, i]` tells where the i-th rank row of A begins in the arena, and
    `rows[slot, slice, 1, i]` that of B (its i-th column, scaling included)."""

    rows: Tensor  # [slots, slices, 2, most ranks] int32, in units of 64 elements
    ranks: Tensor  # [slots, slices] int32; 0 where the adapter leaves the linear alone
    spans: Tensor  # [slices, 2] int32: first output column and how many
    inputs: int
    widest: int  # columns of the widest slice


@dataclass(frozen=True, slots=True)
class LoraStep:
    """Which rows of a step use which adapter slot."""

    order: Tensor  # [tokens] int32: the rows that use an adapter, sorted by slot
    chunks: Tensor  # [chunks, 3] int32: slot, first place in `order`, how many (0: padding)
    chunk_rows: int  # the most that a chunk holds: 16 or more, a power of two
    most_rank: int  # of the adapters in use


def lora_reference(y: Tensor, x: Tensor, arena: Tensor, site: LoraSite, step: LoraStep) -> None:
    """y += (x A^T) B in place. `x` is [tokens, inputs], `y` [tokens, outputs], `arena` a
    flat tensor; products are summed in float32 and rounded where the kernels round."""
    for slot, first, count in step.chunks.tolist():
        tokens = step.order[first : first + count].long()
        for i, (start, width) in enumerate(site.spans.tolist()):
            rank = int(site.ranks[slot, i])
            if not rank or not count:
                continue
            a = _rank_rows(arena, site.rows[slot, i, 0, :rank], site.inputs)
            b = _rank_rows(arena, site.rows[slot, i, 1, :rank], width)
            low = (x[tokens].float() @ a.float().T).to(arena.dtype)
            gain = low.float() @ b.float()
            columns = slice(start, start + width)
            y[tokens, columns] = (y[tokens, columns].float() + gain).to(y.dtype)


def _rank_rows(arena: Tensor, places: Tensor, width: int) -> Tensor:
    columns = torch.arange(width, device=arena.device)
    return arena[places.long()[:, None] * UNIT + columns]
