"""Which adapter lies where, with the generation that every step must name.

A slot is what the scheduler calls an adapter's place; a seat is where its weights really lie.
Adapters used by the present steps are moved to neighbouring seats, so that one product over a
range of seats reads little that no row needs.
"""

from dataclasses import dataclass

import torch

from engine.adapter_files import AdapterWeights
from engine.batch import AdapterHandle, Row
from engine.errors import IntegrityError
from engine.layers.lora import LoraStack, LoraStep, stack_bytes
from engine.layers.lora_plan import plan_groups
from engine.models.spec import ModelSpec

_MOVES_A_STEP = 2  # each copies an adapter once or twice: a few milliseconds
_SLACK = 1.5  # how much longer than its users a range of seats may be
_WARM = (
    2  # seats left lately whose memory waits for the next adapter: fresh pages cost thrice a copy
)


@dataclass(slots=True)
class _Seated:
    handle: AdapterHandle
    rank: int
    seat: int


class LoraSlots:
    """Loaded adapters, one stack a rank."""

    def __init__(self, spec: ModelSpec, slots: int, dtype: torch.dtype) -> None:
        self._spec = spec
        self._dtype = dtype
        self._stacks: dict[int, LoraStack] = {}
        self._slots: list[_Seated | None] = [None] * slots
        self._seats: dict[int, list[_Seated | None]] = {}  # by rank
        self._warm: list[tuple[int, int]] = []  # (rank, seat), oldest first

    def bytes(self, rank: int) -> int:
        return stack_bytes(self._spec, rank, self._dtype)

    def load(self, handle: AdapterHandle, weights: AdapterWeights) -> None:
        if self._slots[handle.slot] is not None:
            raise IntegrityError(f"slot {handle.slot} still holds an adapter: unload it first")
        rank, count = weights.rank, len(self._slots)
        if rank not in self._stacks:
            self._stacks[rank] = LoraStack(self._spec, count, rank, self._dtype)
            self._seats[rank] = [None] * count
        seat = self._free_seat(rank)
        self._stacks[rank].store(seat, weights)
        self._slots[handle.slot] = self._seats[rank][seat] = _Seated(handle, rank, seat)

    def unload(self, handle: AdapterHandle) -> None:
        seated = self._of(handle)
        self._seats[seated.rank][seated.seat] = None
        self._slots[handle.slot] = None
        self._warm.append((seated.rank, seated.seat))
        if len(self._warm) > _WARM:
            rank, seat = self._warm.pop(0)
            self._stacks[rank].clear(seat)

    def seats(self) -> dict[int, int]:
        """Where each held slot's weights lie now, among those of its rank."""
        return {slot: held.seat for slot, held in enumerate(self._slots) if held is not None}

    def place(self, row: Row) -> tuple[int, int]:
        """What rows are sorted by: (rank, seat), with rows of the base model first.

        Raises IntegrityError for a stale handle.
        """
        if row.adapter is None:
            return 0, 0
        seated = self._of(row.adapter)
        return seated.rank, seated.seat

    def gather(self, rows: list[Row]) -> None:
        """Moves the adapters of this step together where they lie too far apart."""
        used = {row.adapter.slot for row in rows if row.adapter is not None}
        by_rank: dict[int, list[_Seated]] = {}
        for slot in used:
            seated = self._slots[slot]
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

    def _of(self, handle: AdapterHandle) -> _Seated:
        seated = self._slots[handle.slot]
        if seated is None or seated.handle != handle:
            raise IntegrityError(
                f"slot {handle.slot} does not hold adapter {handle.digest[:12]} of generation "
                f"{handle.generation}: the step stops rather than use other weights"
            )
        return seated
