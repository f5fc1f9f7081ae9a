"""The adapters of a CPU: the position in a stack of the weights of each device slot.

A slot is the scheduler's number of a loaded adapter; a stack slot is where its weights lie.
Adapters used by the present steps are moved to adjacent stack slots, so that one product over a
range of them reads few weights that no row needs.
"""

from dataclasses import dataclass, replace

import torch

from engine.adapters.files import AdapterWeights
from engine.adapters.memory import AdapterMemory
from engine.backends.cpu.row_lora import RowLoraStep
from engine.backends.layers.adapter_extras import AdapterExtras
from engine.backends.layers.kv import KvPool
from engine.backends.layers.lora import LoraStack, LoraStep, stack_bytes
from engine.backends.layers.lora_plan import plan_groups
from engine.batch import Row
from engine.config import EngineConfig
from engine.model_spec import ModelSpec
from engine.models.shares import Shard
from engine.runners.cpu.extra_rows import NOT_BY_ROW, extra_rows

_MAX_MOVES_PER_STEP = 2  # each copies one or two adapters: a few milliseconds
_MAX_SPREAD = 1.5  # how much longer than its adapters a range of stack slots may be
# Released stack slots that keep their memory for the next adapter: fresh pages cost three times
# what the copy does.
_WARM = 2


@dataclass(slots=True)
class _StackLocation:
    rank: int
    stack_slot: int


class CpuAdapters(AdapterMemory[AdapterWeights]):
    """A CPU's adapters, with one stack per rank."""

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
        self._stacks: dict[int, LoraStack] = {}
        self._slots: dict[int, _StackLocation] = {}
        self._stack_slots: dict[int, list[_StackLocation | None]] = {}  # by rank
        self._warm: list[tuple[int, int]] = []  # (rank, slot), oldest first
        self._extras: dict[int, AdapterExtras] = {}  # by device slot

    def _prepare(self, weights: AdapterWeights) -> tuple[AdapterWeights, int]:
        if self._by_row and weights.extras is not None:
            raise ValueError(NOT_BY_ROW)
        extras = weights.extras
        if extras is not None and extras.head is not None:
            weights = replace(weights, extras=replace(extras, head=extras.head.packed()))
        needed = stack_bytes(self._spec, weights.rank, self._dtype)
        return weights, -(-needed // self._pool.block_bytes)

    def _bytes_of(self, copy: AdapterWeights) -> int:
        extras = 0 if copy.extras is None else copy.extras.bytes
        return extras + sum(a.nbytes + b.nbytes for a, b in copy.matrices.values())

    def _store(self, slot: int, copy: AdapterWeights, blocks: list[int]) -> None:
        self._pool.lend(blocks)
        rank, count = copy.rank, len(self._loaded)
        if rank not in self._stacks:
            self._stacks[rank] = LoraStack(self._spec, count, rank, self._dtype)
            self._stack_slots[rank] = [None] * count
        stack_slot = self._free_stack_slot(rank)
        self._stacks[rank].store(stack_slot, copy.matrices)
        self._slots[slot] = self._stack_slots[rank][stack_slot] = _StackLocation(rank, stack_slot)
        if copy.extras is not None:
            self._extras[slot] = copy.extras

    def _clear(self, slot: int) -> None:
        location = self._slots.pop(slot)
        self._extras.pop(slot, None)
        self._stack_slots[location.rank][location.stack_slot] = None
        self._warm.append((location.rank, location.stack_slot))
        if len(self._warm) > _WARM:
            rank, stack_slot = self._warm.pop(0)
            self._stacks[rank].clear(stack_slot)

    def sort_key(self, row: Row) -> tuple[int, int]:
        """The sort key of a row: (rank, stack slot), with rows of the base model first.

        Raises IntegrityError for a stale handle.
        """
        if row.adapter is None:
            return 0, 0
        self.check(row.adapter)
        location = self._slots[row.adapter.slot]
        return location.rank, location.stack_slot

    def compact(self, rows: list[Row]) -> None:
        """Moves the adapters of this step together if they are too far apart in their stack."""
        used = {row.adapter.slot for row in rows if row.adapter is not None}
        by_rank: dict[int, list[_StackLocation]] = {}
        for slot in used:
            location = self._slots.get(slot)
            if location is not None:
                by_rank.setdefault(location.rank, []).append(location)
        for rank, locations in by_rank.items():
            self._compact(rank, locations)

    def step(self, decodes: list[Row], prefills: list[Row]) -> LoraStep | None:
        """None when no row has an adapter. Rows are sorted by `sort_key` within both lists."""
        if all(row.adapter is None for rows in (decodes, prefills) for row in rows):
            return None
        first = 0
        groups = []
        for rows in (decodes, prefills):
            row_keys = [(*self.sort_key(row), len(row.tokens)) for row in rows]
            groups += plan_groups(row_keys, first, pad=rows is decodes and not self._by_row)
            first += sum(count for _, _, count in row_keys)
        kind = RowLoraStep if self._by_row else LoraStep
        return kind(self._stacks, groups, extra_rows(decodes + prefills, self._extras))

    def _free_stack_slot(self, rank: int) -> int:
        for sort_key in self._warm:
            if sort_key[0] == rank:
                self._warm.remove(sort_key)
                return sort_key[1]
        return self._stack_slots[rank].index(None)

    def _compact(self, rank: int, used: list[_StackLocation]) -> None:
        stack_slots, stack = self._stack_slots[rank], self._stacks[rank]
        busy = {location.stack_slot for location in used}
        for _ in range(_MAX_MOVES_PER_STEP):
            low, high = min(busy), max(busy)
            if high - low + 1 <= _MAX_SPREAD * len(busy) + 1:
                return
            free = next(stack_slot for stack_slot in range(low, high) if stack_slot not in busy)
            moved, displaced = stack_slots[high], stack_slots[free]
            if displaced is None:
                stack.move(high, free)
                if (rank, free) in self._warm:
                    self._warm[self._warm.index((rank, free))] = rank, high
                else:
                    stack.clear(high)
            else:
                stack.swap(high, free)
                displaced.stack_slot = high
            assert moved is not None
            moved.stack_slot = free
            stack_slots[free], stack_slots[high] = moved, displaced
            busy = busy - {high} | {free}
