"""Adapters of a CPU that the compiled kernel adds: packed once, in host memory, and read where they lie.
Loading one copies nothing."""

from dataclasses import dataclass, replace
from itertools import groupby

import torch

from engine.adapters.files import AdapterWeights
from engine.adapters.memory import AdapterMemory
from engine.backends.cpu.packed_products import (
    PackedLoraStep,
    PackedMatrices,
    packed_bytes,
    packed_matrices,
)
from engine.backends.layers.adapter_extras import AdapterExtras
from engine.backends.layers.kv import KvPool
from engine.backends.layers.lora import LoraStep
from engine.batch import Row
from engine.config import EngineConfig
from engine.model_spec import ModelSpec
from engine.models.shares import Shard
from engine.runners.cpu.extra_rows import NOT_BY_ROW, extra_rows


@dataclass(frozen=True, slots=True)
class _Copy:
    matrices: PackedMatrices
    extras: AdapterExtras | None


class PackedAdapters(AdapterMemory[_Copy]):
    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        dtype: torch.dtype,
        pool: KvPool,
        shard: Shard | None = None,
    ) -> None:
        super().__init__(config, spec, dtype, shard)
        self._pool = pool
        self._by_row = config.batch_invariant
        self._slots: dict[int, PackedMatrices] = {}
        self._extras: dict[int, AdapterExtras] = {}  # by slot

    def _prepare(self, weights: AdapterWeights) -> tuple[_Copy, int]:
        extras = weights.extras
        if self._by_row and extras is not None:
            raise ValueError(NOT_BY_ROW)
        if extras is not None and extras.head is not None:
            extras = replace(extras, head=extras.head.packed())
        packed = packed_matrices(self._spec, weights.rank, weights.matrices, self._dtype)
        needed = packed_bytes(self._spec, weights.rank, self._dtype)
        return _Copy(packed, extras), -(-needed // self._pool.block_bytes)

    def _bytes_of(self, copy: _Copy) -> int:
        return copy.matrices.data.nbytes + (0 if copy.extras is None else copy.extras.bytes)

    def _store(self, slot: int, copy: _Copy, blocks: list[int]) -> None:
        self._pool.lend(blocks)
        self._slots[slot] = copy.matrices
        if copy.extras is not None:
            self._extras[slot] = copy.extras

    def _clear(self, slot: int) -> None:
        del self._slots[slot]
        self._extras.pop(slot, None)

    def sort_key(self, row: Row) -> tuple[int, int]:
        """(rank, slot), with rows of the base model first. Raises IntegrityError for a stale handle."""
        if row.adapter is None:
            return 0, 0
        self.check(row.adapter)
        return self._slots[row.adapter.slot].rank, row.adapter.slot

    def step(self, decodes: list[Row], prefills: list[Row]) -> LoraStep | None:
        """None when no row has an adapter. Rows are sorted by `sort_key` within both lists."""
        if all(row.adapter is None for rows in (decodes, prefills) for row in rows):
            return None
        first, found = 0, []
        for rows in (decodes, prefills):
            for (rank, slot), of_slot in groupby(rows, self.sort_key):
                count = sum(len(row.tokens) for row in of_slot)
                if rank:
                    found.append((self._slots[slot], first, count))
                first += count
        return PackedLoraStep(self._spec, found, extra_rows(decodes + prefills, self._extras))
