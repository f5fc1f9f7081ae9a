"""The adapters of a CPU: the position in a stack of the weights of each device slot.

A slot is the scheduler's number of a loaded adapter; a stack slot is where its weights lie.
Adapters used by the present steps are moved to adjacent stack slots, so that one product over a
range of them reads few weights that no row needs.
"""

from dataclasses import dataclass

import torch

from engine.adapter_files import AdapterWeights
from engine.adapter_memory import AdapterMemory
from engine.batch import Row
from engine.config import EngineConfig
from engine.layers.kv import KvPool, block_bytes
from engine.layers.lora import LoraStack, LoraStep, stack_bytes
from engine.layers.lora_plan import plan_groups
from engine.models.spec import ModelSpec

_MOVES_A_STEP = 2  # each copies one or two adapters: a few milliseconds
_SLACK = 1.5  # how much longer than its adapters a range of stack slots may be
# Released stack slots that keep their memory for the next adapter: fresh pages cost three times
# what the copy does.
_WARM = 2


@dataclass(slots=True)
class _Seated:
    rank: int
    seat: int


class LoraSlots(AdapterMemory[AdapterWeights]):
    """A CPU's adapters, with one stack per rank."""

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, pool: KvPool
    ) -> None:
        super().__init__(config, spec, dtype)
        self._pool = pool
        self._stacks: dict[int, LoraStack] = {}
        self._slots: dict[int, _Seated] = {}
        self._seats: dict[int, list[_Seated | None]] = {}  # by rank
        self._warm: list[tuple[int, int]] = []  # (rank, seat), oldest first

    def _made_ready(self, weights: AdapterWeights) -> tuple[AdapterWeights, int]:
        needed = stack_bytes(self._spec, weights.rank, self._dtype)
        return weights, -(-needed // block_bytes(self._spec, self._pool.block_size, self._dtype))

    def _fill(self, slot: int, copy: AdapterWeights, blocks: list[int]) -> None:
        self._pool.lend(blocks)
        rank, count = copy.rank, len(self._held)
        if rank not in self._stacks:
            self._stacks[rank] = LoraStack(self._spec, count, rank, self._dtype)
            self._seats[rank] = [None] * count
        seat = self._free_seat(rank)
        self._stacks[rank].store(seat, copy.matrices)
        self._slots[slot] = self._seats[rank][seat] = _Seated(rank, seat)

    def _clear(self, slot: int) -> None:
        seated = self._slots.pop(slot)
        self._seats[seated.rank][seated.seat] = None
        self._warm.append((seated.rank, seated.seat))
        if len(self._warm) > _WARM:
            rank, seat = self._warm.pop(0)
            self._stacks[rank].clear(seat)

    def place(self, row: Row) -> tuple[int, int]:
        """The sort key of a row: (rank, stack slot), with rows of the base model first.

        Raises IntegrityError for a stale handle.
        """
        if row.adapter is None:
            return 0, 0
        self.check(row.adapter)
        seated = self._slots[row.adapter.slot]
        return seated.rank, seated.seat

    def gather(self, rows: list[Row]) -> None:
        """Moves the adapters of this step together if they are too far apart in their stack."""
        used = {row.adapter.slot for row in rows if row.adapter is not None}
        by_rank: dict[int, list[_Seated]] = {}
        for slot in used:
            seated = self._slots.get(slot)
            if seated is not None:
                by_rank.setdefault(seated.rank, []).append(seated)
        for rank, seated_here in by_rank.items():
            self._gather(rank, seated_here)

    def step(self, decodes: list[Row], prefills: list[Row]) -> LoraStep | None:
        """None when no row has an adapter. Rows are sorted by `place` within both lists."""
        if all(row.adapter is None for rows in (decodes, prefills) for row in rows):
            return None
        first = 0
        groups = []
        for rows in (decodes, prefills):
            places = [(*self.place(row), len(row.tokens)) for row in rows]
            groups += plan_groups(places, first, pad=rows is decodes)
            first += sum(count for _, _, count in places)
        return LoraStep(self._stacks, groups)

    def _free_seat(self, rank: int) -> int:
        for place in self._warm:
            if place[0] == rank:
                self._warm.remove(place)
                return place[1]
        return self._seats[rank].index(None)

    def _gather(self, rank: int, used: list[_Seated]) -> None:
        seats, stack = self._seats[rank], self._stacks[rank]
        busy = {seated.seat for seated in used}
        for _ in range(_MOVES_A_STEP):
            low, high = min(busy), max(busy)
            if high - low + 1 <= _SLACK * len(busy) + 1:
                return
            hole = next(seat for seat in range(low, high) if seat not in busy)
            moved, displaced = seats[high], seats[hole]
            if displaced is None:
                stack.move(high, hole)
                if (rank, hole) in self._warm:
                    self._warm[self._warm.index((rank, hole))] = rank, high
                else:
                    stack.clear(high)
            else:
                stack.swap(high, hole)
                displaced.seat = high
            assert moved is not None
            moved.seat = hole
            seats[hole], seats[high] = moved, displaced
            busy = busy - {high} | {hole}
