"""A step whose layers go on for its sampled rows alone: beyond the last keys and values that are written,
nothing that a later step reads depends on the others."""

from dataclasses import replace

import torch
from torch import Tensor

from engine.backends.gpu.adapters.lora_reference import LoraStep
from engine.backends.gpu.attention_reference import AttentionStep
from engine.backends.gpu.pointwise_reference import RotaryStep
from engine.backends.gpu.step import DeviceStep


def all_sampled(step: DeviceStep) -> bool:
    """Whether every sequence decodes, so that few rows or none are not sampled."""
    return step.attention.mix is None and step.attention.decodes == step.tokens.shape[0]


def of_sampled(step: DeviceStep, splits: int) -> DeviceStep:
    """Each sampled row as a sequence that decodes, without host reads. Rows are in the order of the step,
    so what does not follow the row before is a graph's padding: it sees no keys."""
    rows = step.sampled
    real = torch.cat((torch.ones_like(rows[:1]), rows.diff())) > 0
    positions = step.rotary.positions.index_select(0, rows)
    attention = AttentionStep(
        tables=step.attention.tables,
        table_rows=step.sampled_rows,
        seq_lens=(positions + 1) * real,
        cu_q=torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
        decodes=len(rows),
    )
    return replace(
        step,
        rotary=RotaryStep(positions, positions),  # there is nothing to be stored
        attention=attention,
        lora=None if step.lora is None else _lora(step.lora, rows, real),
        splits=splits,
    )


def _lora(lora: LoraStep, rows: Tensor, real: Tensor) -> LoraStep:
    """Each chunk with those of its rows that are sampled."""
    assert lora.chunk_of is not None
    chunk_of = torch.where(real, lora.chunk_of.index_select(0, rows), -1)
    in_order, order = chunk_of.sort(stable=True)
    numbers = torch.arange(len(lora.chunks), dtype=torch.int32, device=rows.device)
    first, end = (
        torch.searchsorted(in_order, numbers, right=right, out_int32=True)
        for right in (False, True)
    )
    chunks = torch.stack((lora.chunks[:, 0], first, end - first), 1)
    return replace(lora, order=order.int(), chunks=chunks, chunk_of=chunk_of)


def fitting_splits(rows: int, heads: int, most: int, partials: int) -> int:
    """Splits of the keys of so many rows, a power of two, for whose partial results there is memory."""
    room = max(1, partials // (rows * heads))
    return min(most, 1 << (room.bit_length() - 1))
