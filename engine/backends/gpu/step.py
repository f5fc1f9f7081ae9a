"""The index arrays of a step: built on the host, sent in one copy, read by the kernels as views."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.gpu.adapters.lora_chunks import chunk_of_rows
from engine.backends.gpu.adapters.lora_reference import EndRows, LoraStep
from engine.backends.gpu.attention_reference import Answers, AttentionStep
from engine.backends.gpu.mixed import Mix, MixLimits
from engine.backends.gpu.observed import Observed
from engine.backends.gpu.part_tables import PartTables
from engine.backends.gpu.pointwise_reference import RotaryStep
from engine.backends.layers.step import positions_and_slots, sampled_tokens, token_ids
from engine.backends.layers.transfer import pinned, send
from engine.batch import Row

Ints = NDArray[np.int32]
# Of an adapter with a token table or head of its own: its slot, and its rows among the step's tokens and
# among the sampled rows.
HostEnd = tuple[int, NDArray[np.int64], NDArray[np.int64]]
_ALIGN = 16  # elements: Triton recompiles for a pointer that is not aligned to 16 bytes


@dataclass(frozen=True, slots=True)
class LoraRows:
    """The adapter slot of each row, on the host; see `LoraStep`."""

    order: Ints
    chunks: Ints
    chunk_rows: int
    max_rank: int
    slots: Ints | None = None  # of each token, where an adapter changes experts; -1: none
    rescaled: bool = False  # an adapter has DoRA's factors
    ends: tuple[HostEnd, ...] = ()


@dataclass(frozen=True, slots=True)
class HostStep:
    """The arrays of a step, in the order in which they are sent."""

    tokens: Ints  # [tokens] ids, or -1 - row for the last sampled token of that sequence row
    positions: Ints
    slots: Ints
    table_rows: Ints  # [sequences]
    seq_lens: Ints
    cu_q: Ints
    sampled: Ints  # token rows whose logits are computed
    sampled_rows: Ints  # the sequence row of each
    decodes: int
    lora: LoraRows | None = None
    sequences: int | None = None  # without padding, where a graph is for steps with prompt chunks
    observed: tuple[Observed, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A `HostStep` on the device."""

    tokens: Tensor
    rotary: RotaryStep
    attention: AttentionStep
    sampled: Tensor
    sampled_rows: Tensor
    lora: LoraStep | None
    splits: int  # of the keys of decoding sequences; with a mix the most
    memory: list[tuple[int, int]]  # of every tensor that a recorded graph reads
    observed: tuple[Observed, ...] = ()
    # Of each page of a part, for layers with a window that are kept apart: its table and its slots.
    parts: tuple[tuple[Tensor, Tensor], ...] = ()

    def rotary_of(self, piece: int) -> RotaryStep:
        """Of layers that are in this piece of a block (`KvPool.kinds`)."""
        if not piece:
            return self.rotary
        return RotaryStep(self.rotary.positions, self.parts[piece - 1][1])

    def attention_of(self, piece: int) -> AttentionStep:
        """Likewise."""
        return replace(self.attention, tables=self.parts[piece - 1][0]) if piece else self.attention


def host_step(
    decodes: list[Row], prefills: list[Row], sequence_rows: list[int], block_size: int
) -> HostStep:
    """Sequences of one token first, then longer ones; `sequence_rows` holds their sequence rows."""
    rows = [*decodes, *prefills]
    lengths = [len(row.tokens) for row in rows]
    cu_q = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=cu_q[1:])
    positions, slots = positions_and_slots(decodes, prefills, block_size)
    return HostStep(
        tokens=_ints(token_ids(rows, lambda n: -1 - sequence_rows[n])),
        positions=_ints(positions),
        slots=_ints(slots),
        table_rows=_ints(sequence_rows),
        seq_lens=_ints([row.start + n for row, n in zip(rows, lengths, strict=True)]),
        cu_q=cu_q,
        sampled=_ints(sampled_tokens(rows)),
        sampled_rows=_ints(
            [
                n
                for n, row in zip(sequence_rows, rows, strict=True)
                for _ in range(row.sampled_tokens)
            ]
        ),
        decodes=len(decodes),
    )


def padded(step: HostStep, tokens: int, chunks: int, sequences: int = 0) -> HostStep:
    """A step padded to a graph's size: the padding reads and writes nothing. `sequences`: of a graph for
    steps with prompt chunks; 0: every token is that of a decoding sequence."""
    lora = step.lora
    if lora is not None:
        order, wide = _widen(lora.order, tokens), _widen(lora.chunks, chunks)
        lora = replace(lora, order=order, chunks=wide)
    most = sequences or tokens
    return HostStep(
        tokens=_widen(step.tokens, tokens),
        positions=_widen(step.positions, tokens),
        slots=_widen(step.slots, tokens, -1),
        table_rows=_widen(step.table_rows, most),
        seq_lens=_widen(step.seq_lens, most),
        cu_q=_widen(step.cu_q, most + 1, int(step.cu_q[-1])),
        sampled=_widen(step.sampled, most),
        sampled_rows=_widen(step.sampled_rows, most),
        decodes=step.decodes if sequences else tokens,
        lora=lora,
        sequences=len(step.table_rows) if sequences else None,
    )


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The storage and the offset in it. Unlike an address, a fake tensor has them too."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


class StepBuffer:
    """The device memory that receives every step's arrays: equal sizes always have the same
    addresses, as graphs require."""

    def __init__(
        self,
        max_tokens: int,
        max_sequences: int,
        device: torch.device,
        answers: Answers | None = None,
        parts: PartTables | None = None,
    ) -> None:
        self._answers = answers
        self._parts = parts or PartTables(None, 0, 0, 1)
        arrays = 13 + self._parts.count
        size = (9 + self._parts.count) * max_tokens + 6 * max_sequences + arrays * (_ALIGN + 1)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)

    def send(
        self, step: HostStep, tables: Tensor, splits: int, limits: MixLimits | None = None
    ) -> DeviceStep:
        """`limits`: of the graph, if the step is padded for one with prompt chunks."""
        lora = step.lora
        arrays = [
            step.tokens, step.positions, step.slots, step.table_rows, step.seq_lens, step.cu_q,
            step.sampled, step.sampled_rows,
        ]  # fmt: skip
        if lora is not None:
            owners = chunk_of_rows(lora.order, lora.chunks, len(step.tokens))
            arrays += [lora.order, lora.chunks.reshape(-1), owners]
            arrays += [] if lora.slots is None else [lora.slots]
        of_parts = slice(len(arrays), len(arrays) + self._parts.count)
        arrays += self._parts.slots(step.slots)
        if limits is not None:
            arrays.append(np.array([step.decodes, step.sequences, splits], np.int32))
        starts = []
        end = 0
        for array in arrays:
            starts.append(end)
            end += -(-len(array) // _ALIGN) * _ALIGN
        host = np.zeros(end, np.int32)
        for start, array in zip(starts, arrays, strict=True):
            host[start : start + len(array)] = array
        copied = pinned(torch.from_numpy(host), self._device.device)
        self._device[:end].copy_(copied, non_blocking=True)
        parts = [
            self._device[start : start + len(array)]
            for start, array in zip(starts, arrays, strict=True)
        ]
        mix = None if limits is None else Mix(parts[-1], limits)
        return DeviceStep(
            tokens=parts[0],
            rotary=RotaryStep(parts[1], parts[2]),
            attention=AttentionStep(
                tables=tables,
                table_rows=parts[3],
                seq_lens=parts[4],
                cu_q=parts[5],
                decodes=step.decodes if mix is None else 0,
                mix=mix,
                answers=self._answers,
            ),
            observed=step.observed,
            parts=tuple(zip(self._parts.views(tables), parts[of_parts], strict=True)),
            sampled=parts[6],
            sampled_rows=parts[7],
            lora=None
            if lora is None
            else LoraStep(
                parts[8],
                parts[9].view(-1, 3),
                lora.chunk_rows,
                lora.max_rank,
                None if lora.slots is None else parts[11],
                parts[10],
                lora.rescaled,
                tuple(self._end_rows(each) for each in lora.ends),
            ),
            splits=splits if limits is None else limits.splits,
            memory=[_memory(tensor) for tensor in (tables, *parts)],
        )

    def _end_rows(self, end: HostEnd) -> EndRows:
        slot, *rows = end
        return EndRows(slot, *(send(torch.from_numpy(each), self._device.device) for each in rows))


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int32)


def _widen(array: Ints, length: int, value: int = 0) -> Ints:
    wide = np.full((length, *array.shape[1:]), value, np.int32)
    wide[: len(array)] = array
    return wide
