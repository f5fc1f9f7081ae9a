"""Adapters on a GPU: packed in host memory, copied into the KV blocks allocated for them."""

from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.adapters.files import AdapterWeights
from engine.adapters.memory import AdapterMemory
from engine.backends.gpu.adapters.adapter_image import first_units
from engine.backends.gpu.adapters.adapter_pages import (
    AdapterTable,
    PackedAdapter,
    factor_pairs,
    pack_adapter,
    packed_parts,
    table_parts,
)
from engine.backends.gpu.adapters.lora_chunks import chunk_rows_for, sort_into_chunks
from engine.backends.gpu.adapters.lora_reference import UNIT
from engine.backends.gpu.launch import power_of_two
from engine.backends.gpu.step import HostEnd, HostStep, LoraRows
from engine.backends.gpu.streams import side_stream
from engine.backends.layers.kv import KvPool
from engine.backends.layers.transfer import on_device
from engine.batch import Row
from engine.config import EngineConfig
from engine.model_spec import ModelSpec

_COPY_BATCH = 64  # blocks staged on the device before they are scattered into the pool


class _Kinds(NamedTuple):
    """What an adapter has in addition to low-rank updates of the layers."""

    experts: bool = False
    rescales: bool = False
    ends: bool = False


class GpuAdapters(AdapterMemory[PackedAdapter]):
    def __init__(
        self, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, pool: KvPool
    ) -> None:
        super().__init__(config, spec, dtype)
        # With a block's part in pages, a whole block has several places for a block of an adapter.
        self._block_elements = pool.bare_bytes // dtype.itemsize
        self._places = pool.block_bytes // pool.bare_bytes
        self._pieces = pool.pieces
        self._units = pool.arena[: pool.arena.numel() // UNIT * UNIT].view(-1, UNIT)
        self._ranks = [0] * config.max_adapter_slots
        self._kinds = [_Kinds()] * config.max_adapter_slots
        self._sorted_rows: tuple[object, LoraRows] | None = None
        self._side = side_stream(pool.arena.device)
        self.table: AdapterTable | None = None
        self.rank_sizes: list[int] = []  # a step's largest rank is rounded up to one of these
        if config.enable_lora:
            max_rank = -(-config.max_lora_rank // 16) * 16
            self.rank_sizes = sorted({16, max_rank})
            self.table = AdapterTable(
                spec, config.max_adapter_slots, max_rank, self._block_elements, self._units.device
            )

    def _prepare(self, weights: AdapterWeights) -> tuple[PackedAdapter, int]:
        extras, matrices = weights.extras, weights.matrices
        names = table_parts(self._spec)
        if extras is not None:
            matrices = {**matrices, **extras.pairs, **factor_pairs(extras)}
            names = packed_parts(self._spec)
        packed = pack_adapter(
            matrices, self._spec.layers, self._block_elements, self._dtype,
            pinned=self._side is not None, names=names, extras=extras,
        )  # fmt: skip
        return packed, -(-packed.image.shape[0] // self._places)

    def _bytes_of(self, copy: PackedAdapter) -> int:
        """torch rounds pinned memory up to a power of two."""
        size = copy.image.nbytes
        return size if self._side is None else power_of_two(size)

    def _store(self, slot: int, copy: PackedAdapter, blocks: list[int]) -> None:
        numbers = [number for block in blocks for _, number in self._pieces(block)]
        self._copy_to_blocks(copy.image, numbers[: copy.image.shape[0]])
        if self.table is not None:
            self.table.fill(slot, copy, torch.tensor(numbers))
        self._ranks[slot] = copy.offsets.shape[-1]
        self._kinds[slot] = _Kinds(copy.of_experts, copy.rescales, copy.ends is not None)

    def _clear(self, slot: int) -> None:
        if self.table is not None:
            self.table.clear(slot)

    def add_to(self, step: HostStep, rows: list[Row]) -> HostStep:
        """Add the adapter rows, sorted by adapter, to a step that uses any adapter. Raises
        IntegrityError when a handle's generation is not the slot's."""
        handles = {row.adapter for row in rows if row.adapter is not None}
        if not handles:
            return step
        for handle in handles:
            self.check(handle)
        lengths = step.cu_q[1:] - step.cu_q[:-1]
        mapping = [
            (-1, 0) if row.adapter is None else (row.adapter.slot, row.adapter.generation)
            for row in rows
        ]
        key = (mapping, lengths.tolist())
        if self._sorted_rows is None or self._sorted_rows[0] != key:
            by_token = np.repeat(np.array([slot for slot, _ in mapping]), lengths)
            tokens = len(step.tokens)
            chunk_rows = chunk_rows_for(0 if tokens == step.decodes else tokens)
            order, chunks = sort_into_chunks(by_token, chunk_rows)
            max_rank = max(self._ranks[handle.slot] for handle in handles)
            size = next(size for size in self.rank_sizes if size >= max_rank)
            kinds = [self._kinds[handle.slot] for handle in handles]
            slots = by_token.astype(np.int32) if any(each.experts for each in kinds) else None
            rescaled = any(each.rescales for each in kinds)
            self._sorted_rows = key, LoraRows(order, chunks, chunk_rows, size, slots, rescaled)
        lora, ends = self._sorted_rows[1], self._ends(step, mapping)
        return replace(step, lora=replace(lora, ends=ends) if ends else lora)

    def _ends(self, step: HostStep, mapping: list[tuple[int, int]]) -> tuple[HostEnd, ...]:
        """The rows of each adapter with a token table or head of its own."""
        some = {slot for slot, _ in mapping if slot >= 0 and self._kinds[slot].ends}
        if not some:
            return ()
        lengths = step.cu_q[1:] - step.cu_q[:-1]
        by_token = np.repeat(np.array([slot for slot, _ in mapping], np.int32), lengths)
        by_sampled = by_token[step.sampled]
        return tuple(
            (slot, np.flatnonzero(by_token == slot), np.flatnonzero(by_sampled == slot))
            for slot in sorted(some)
        )

    def _copy_to_blocks(self, image: Tensor, blocks: list[int]) -> None:
        """Copies to the device during the running step, and into the blocks after it."""
        device = self._units.device
        width = image.shape[1] // UNIT
        index = on_device(blocks, device)
        for first in range(0, image.shape[0], _COPY_BATCH):
            part = slice(first, first + _COPY_BATCH)
            with torch.cuda.stream(self._side) if self._side is not None else nullcontext():
                staged = image[part].to(device, non_blocking=True)
            if self._side is not None:
                stream = torch.cuda.current_stream(device)
                stream.wait_stream(self._side)
                staged.record_stream(stream)
            begins = first_units(index[part], self._block_elements)
            places = (begins[:, None] + torch.arange(width, device=device)).view(-1)
            self._units.index_copy_(0, places, staged.view(-1, UNIT))
