"""Launches segmented LoRA: fused for few inputs and rows, otherwise shrink and expand."""

import torch
from torch import Tensor

from engine.backends.gpu.adapters.lora import expand_kernel, fused_kernel, shrink_kernel
from engine.backends.gpu.adapters.lora_reference import LoraSite, LoraStep
from engine.backends.gpu.launch import precision

FUSED_INPUTS = 2048  # above it, reading A once per part costs more than a second launch
FUSED_PARTS = 4


def fusable(site: LoraSite, step: LoraStep) -> bool:
    return site.inputs <= FUSED_INPUTS and step.chunk_rows == 16


def add_lora(y: Tensor, x: Tensor, arena: Tensor, site: LoraSite, step: LoraStep) -> None:
    """y += (x A^T) B in place, for every row of the step that uses an adapter."""
    if fusable(site, step):
        fused(y, x, arena, site, step)
        return
    mid = shrink_buffer(x, site, step)
    shrink(x, arena, site, step, mid)
    expand(y, mid, arena, site, step)


def shrink_buffer(x: Tensor, site: LoraSite, step: LoraStep) -> Tensor:
    """An uninitialised buffer for the shrunk rows: [splits, rows in the order, slices, ranks]."""
    shape = (shrink_splits(x.shape[0], site.inputs), step.order.shape[0], site.spans.shape[0])
    return torch.empty(*shape, step.max_rank, dtype=torch.float32, device=x.device)


def shrink(x: Tensor, arena: Tensor, site: LoraSite, step: LoraStep, mid: Tensor) -> None:
    """mid = x A^T, one partial sum per split."""
    splits, _, slices, _ = mid.shape
    shrink_kernel[(step.chunks.shape[0], slices, splits)](
        mid, x, arena, step.order, step.chunks, site.rows, site.ranks,
        x.stride(0), mid.stride(0), mid.stride(1), mid.stride(2),
        site.rows.stride(0), site.rows.stride(1), site.ranks.stride(0),
        INPUTS=site.inputs, SPLITS=splits, BLOCK_M=step.chunk_rows,
        BLOCK_R=rank_tile(step.max_rank), BLOCK_K=_inputs_tile(x, step),
        PRECISION=precision(x), num_warps=4, num_stages=_stages(x),
    )  # fmt: skip


def expand(y: Tensor, mid: Tensor, arena: Tensor, site: LoraSite, step: LoraStep) -> None:
    """y += mid B in place."""
    block = 128 if step.chunk_rows == 16 else 64  # wider spills registers
    grid = (step.chunks.shape[0], site.spans.shape[0], -(-site.widest // block))
    expand_kernel[grid](
        y, mid, arena, step.order, step.chunks, site.rows, site.ranks, site.spans,
        y.stride(0), mid.stride(0), mid.stride(1), mid.stride(2),
        site.rows.stride(0), site.rows.stride(1), site.rows.stride(2), site.ranks.stride(0),
        SPLITS=mid.shape[0], BLOCK_M=step.chunk_rows, BLOCK_R=rank_tile(step.max_rank),
        BLOCK_N=block, PRECISION=precision(y), num_warps=4, num_stages=_stages(y),
    )  # fmt: skip


def fused(y: Tensor, x: Tensor, arena: Tensor, site: LoraSite, step: LoraStep) -> None:
    """Shrink and expand in one launch; only for chunks of 16 rows."""
    block = 128
    parts = min(FUSED_PARTS, -(-site.widest // block))
    fused_kernel[(step.chunks.shape[0], site.spans.shape[0], parts)](
        y, x, arena, step.order, step.chunks, site.rows, site.ranks, site.spans,
        x.stride(0), y.stride(0),
        site.rows.stride(0), site.rows.stride(1), site.rows.stride(2), site.ranks.stride(0),
        INPUTS=site.inputs, PARTS=parts, BLOCK_M=step.chunk_rows,
        BLOCK_R=rank_tile(step.max_rank), BLOCK_K=_inputs_tile(x, step), BLOCK_N=block,
        PRECISION=precision(x), num_warps=4, num_stages=_stages(x),
    )  # fmt: skip


def shrink_splits(rows: int, inputs: int) -> int:
    """Splits of the inputs: several while decoding, so that every multiprocessor reads some of A."""
    if rows > 256:
        return 1
    return max(1, min(8, inputs // 512))


def rank_tile(max_rank: int) -> int:
    return 16 if max_rank <= 16 else 32


def _inputs_tile(x: Tensor, step: LoraStep) -> int:
    return 128 if step.chunk_rows == 16 and x.dtype != torch.float32 else 64


def _stages(x: Tensor) -> int:
    return 2 if x.dtype == torch.float32 else 4
