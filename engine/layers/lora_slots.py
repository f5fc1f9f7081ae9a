"""Which adapter lies in which slot, with the generation that every step must name."""

import torch

from engine.adapter_files import AdapterWeights
from engine.batch import AdapterHandle, Row
from engine.errors import IntegrityError
from engine.layers.lora import LoraStack, LoraStep, Segment, stack_bytes
from engine.models.spec import ModelSpec


class LoraSlots:
    """Loaded adapters, one stack a rank."""

    def __init__(self, spec: ModelSpec, slots: int, dtype: torch.dtype) -> None:
        self._spec = spec
        self._dtype = dtype
        self._stacks: dict[int, LoraStack] = {}
        self._held: list[tuple[AdapterHandle, int] | None] = [None] * slots

    def bytes(self, rank: int) -> int:
        return stack_bytes(self._spec, rank, self._dtype)

    def load(self, handle: AdapterHandle, weights: AdapterWeights) -> None:
        if self._held[handle.slot] is not None:
            raise IntegrityError(f"slot {handle.slot} still holds an adapter: unload it first")
        if weights.rank not in self._stacks:
            self._stacks[weights.rank] = LoraStack(
                self._spec, len(self._held), weights.rank, self._dtype
            )
        self._stacks[weights.rank].store(handle.slot, weights)
        self._held[handle.slot] = (handle, weights.rank)

    def unload(self, handle: AdapterHandle) -> None:
        self._stacks[self._rank(handle)].clear(handle.slot)
        self._held[handle.slot] = None

    def step(self, decodes: list[Row], prefills: list[Row]) -> LoraStep | None:
        """None when no row has an adapter. Raises IntegrityError for a stale handle."""
        segments: list[Segment] = []
        first = 0
        for row in (*decodes, *prefills):
            end = first + len(row.tokens)
            if row.adapter is not None:
                rank = self._rank(row.adapter)
                last = segments[-1] if segments else None
                if last is not None and last.slot == row.adapter.slot and last.end == first:
                    segments[-1] = Segment(last.slot, rank, last.first, end)
                else:
                    segments.append(Segment(row.adapter.slot, rank, first, end))
            first = end
        return LoraStep(self._stacks, segments) if segments else None

    def _rank(self, handle: AdapterHandle) -> int:
        held = self._held[handle.slot]
        if held is None or held[0] != handle:
            raise IntegrityError(
                f"slot {handle.slot} does not hold adapter {handle.digest[:12]} of generation "
                f"{handle.generation}: the step stops rather than use other weights"
            )
        return held[1]
