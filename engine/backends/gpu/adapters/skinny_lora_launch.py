"""Launches LoRA for steps of few rows; the product of few rows takes its `Change` along."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.gpu.adapters.lora_launch import rank_tile, shrink_splits
from engine.backends.gpu.adapters.lora_reference import LoraSite, LoraStep
from engine.backends.gpu.adapters.skinny_lora import link_kernel
from engine.backends.gpu.launch import MAX_ROWS, precision
from engine.backends.gpu.overlap import overlapped
from engine.backends.layers.norm import RmsNorm

# Of a thread: by default the assembler spills some to fit more programs on a multiprocessor.
REGISTERS = 224


@dataclass(frozen=True, slots=True)
class Change:
    """What the adapters of a step add to one product."""

    arena: Tensor  # flat: the memory of all blocks
    site: LoraSite
    step: LoraStep
    mid: Tensor  # [16, slices, most ranks, splits of the inputs] float32: the shrunk rows

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of the site's rows by slot and by side, and of its ranks by slot, in elements."""
        return self.site.rows.stride(0), self.site.rows.stride(2), self.site.ranks.stride(0)

    @property
    def chunks(self) -> int:
        return self.step.chunks.shape[0]


def change_of(arena: Tensor, site: LoraSite, step: LoraStep) -> Change:
    """With a buffer for the shrunk rows that is not filled yet."""
    shape = MAX_ROWS, site.spans.shape[0], step.max_rank, splits_of(site.inputs)
    return Change(arena, site, step, torch.empty(shape, dtype=torch.float32, device=arena.device))


def link(x: Tensor, before: Change | None, after: Change | None, norm: RmsNorm | None) -> None:
    """x += `before`, in place, of rows that use an adapter; then `after` gets its shrunk rows, norm(x)
    A^T but for the factor 1 / rms(x) of each row. `x` is [rows, width] with at most 16 rows."""
    change = after or before
    if change is None:
        return
    first, last = before or change, after or change
    if first.strides != last.strides:
        raise ValueError("the sites are not of one table of adapters")
    step, width, splits = change.step, x.shape[1], splits_of(x.shape[1])
    link_kernel[(change.chunks * splits,)](
        x, x if norm is None else norm.weight, change.arena, step.order, step.chunks,
        first.mid, first.site.rows, first.site.ranks, last.mid, last.site.rows, last.site.ranks,
        x.stride(0), *change.strides,
        WIDTH=width, SPLITS=splits, RANKS=step.max_rank,
        EXPAND=0 if before is None else before.mid.shape[3],
        SHRINK=0 if after is None else after.mid.shape[1], NORM=norm is not None,
        BLOCK_R=rank_tile(step.max_rank), BLOCK_K=inputs_tile(x), PRECISION=precision(x),
        **overlapped(), num_warps=4, num_stages=2 if x.dtype == torch.float32 else 4, maxnreg=REGISTERS,
    )  # fmt: skip


def splits_of(inputs: int) -> int:
    """Splits of a shrink's inputs, a power of two."""
    return 1 << (shrink_splits(MAX_ROWS, inputs).bit_length() - 1)


def inputs_tile(x: Tensor) -> int:
    """Inputs in one iteration of a shrink."""
    return 64 if x.dtype == torch.float32 else 128


def grouped_chunks(outputs: int) -> int:
    """Chunks that one product expands, of so many outputs: more would spill registers."""
    return min(4, 128 // outputs)
