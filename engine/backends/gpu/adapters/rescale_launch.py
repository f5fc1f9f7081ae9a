"""Launches DoRA's lengths, and their reference in plain torch."""

from torch import Tensor

from engine.backends.gpu.adapters.lora_reference import UNIT, LoraSite, LoraStep
from engine.backends.gpu.adapters.rescale import rescale_kernel

_COLUMNS = 128  # of a program


def rescale(y: Tensor, arena: Tensor, site: LoraSite, step: LoraStep) -> None:
    """y [tokens, outputs] = y * factor + shift in place, for every row whose adapter has a factor there.
    `site`: of `AdapterTable.rescale`."""
    grid = (step.chunks.shape[0], site.spans.shape[0], -(-site.widest // _COLUMNS))
    rescale_kernel[grid](
        y, arena, step.order, step.chunks, site.rows, site.ranks, site.spans,
        y.stride(0), site.rows.stride(0), site.rows.stride(1), site.rows.stride(2),
        site.ranks.stride(0), BLOCK_M=step.chunk_rows, BLOCK_N=_COLUMNS,
        num_warps=8 if step.chunk_rows > 16 else 4,
    )  # fmt: skip


def rescale_reference(y: Tensor, arena: Tensor, site: LoraSite, step: LoraStep) -> None:
    """The same, in float32 and rounded at the end."""
    for slot, first, count in step.chunks.tolist():
        tokens = step.order[first : first + count].long()
        for piece, (start, width) in enumerate(site.spans.tolist()):
            if not count or not int(site.ranks[slot, piece]):
                continue
            factor, shift = (
                arena[place * UNIT : place * UNIT + width].float()
                for place in site.rows[slot, piece, :, 0].tolist()
            )
            columns = slice(start, start + width)
            y[tokens, columns] = (y[tokens, columns].float() * factor + shift).to(y.dtype)
