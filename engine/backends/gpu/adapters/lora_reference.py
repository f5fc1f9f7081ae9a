"""The reference for segmented LoRA in plain torch, and the records that the kernels use."""

from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = 64  # elements per unit of the row table's offsets: 32 bits address 128 Gi elements


@dataclass(frozen=True, slots=True)
class LoraSite:
    """One linear of one layer, or several over the same input whose outputs are concatenated (its
    slices). `rows[slot, slice, 0, i]` is the offset of the i-th rank row of A in the arena,
    `rows[slot, slice, 1, i]` that of B (its i-th column, scaling included)."""

    rows: Tensor  # [slots, slices, 2, max rank] int32, in units of 64 elements
    ranks: Tensor  # [slots, slices] int32; 0 where the adapter does not change the linear
    spans: Tensor  # [slices, 2] int32: first output column and number of columns
    inputs: int
    widest: int  # columns of the widest slice


@dataclass(frozen=True, slots=True)
class EndRows:
    """The rows of a step that have one adapter, by their numbers, int64."""

    slot: int
    tokens: Tensor  # among the step's tokens
    sampled: Tensor  # among the sampled rows


@dataclass(frozen=True, slots=True)
class LoraStep:
    """The adapter slot of each row of a step."""

    order: Tensor  # [tokens] int32: the rows that use an adapter, sorted by slot
    chunks: Tensor  # [chunks, 3] int32: slot, first index in `order`, count (0: padding)
    chunk_rows: int  # most rows in a chunk: a power of two, 16 or more
    max_rank: int  # the largest rank of the adapters in use
    slots: Tensor | None = None  # [tokens] int32, -1: none; where an adapter changes experts
    chunk_of: Tensor | None = None  # [tokens] int32: the chunk of each row, -1: none; for few rows
    rescaled: bool = False  # an adapter has DoRA's factors
    ends: tuple[EndRows, ...] = ()  # of adapters with a token table or head of their own


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
