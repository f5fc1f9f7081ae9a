"""Adapters of experts on a GPU. A pair of an adapter's slot and an expert stands where the segmented LoRA
kernels (`lora.py`) have a slot: a step's choices are sorted by these pairs, on the device."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.gpu.adapters.lora_reference import LoraSite, LoraStep
from engine.backends.layers.transfer import on_device
from engine.model_spec import ModelSpec

_SIDES = ("gate", "up", "down")


def expert_parts(spec: ModelSpec) -> tuple[str, ...]:
    """The matrices of a layer's experts that adapters may change, those of the shared one last."""
    experts = spec.experts
    if experts is None or experts.stacked:
        return ()
    groups = [f"experts.{number}" for number in range(experts.count)]
    groups += ["shared"] if experts.shared else []
    return tuple(f"{group}.{side}" for group in groups for side in _SIDES)


@dataclass(frozen=True, slots=True)
class ExpertChanges:
    """What adapters change in the mixture of one layer. `gate_up` and `down` have a slot for each pair
    (slot * groups + expert)."""

    arena: Tensor
    gate_up: LoraSite
    down: LoraSite
    slots: Tensor  # [tokens] int32: the adapter's slot of each token; -1: none
    groups: int
    max_rank: int


class ExpertTable:
    """The offsets of every slot's expert matrices in the arena. It takes memory once an adapter has
    some, for the largest rank so far."""

    def __init__(self, spec: ModelSpec, slots: int, device: torch.device) -> None:
        assert spec.experts is not None
        self._experts, self._hidden = spec.experts, spec.hidden
        self.groups = len(expert_parts(spec)) // len(_SIDES)
        shape = (spec.layers, slots, self.groups, len(_SIDES))
        self.rows = torch.zeros(*shape, 2, 0, dtype=torch.int32, device=device)
        self.ranks = torch.zeros(shape, dtype=torch.int32, device=device)
        self._outer = on_device([(0, spec.hidden)], device, torch.int32)
        self._inner = {
            size: on_device([(0, size), (size, size)], device, torch.int32)
            for size in {spec.experts.intermediate, spec.experts.shared}
        }

    def fill(self, slot: int, addresses: Tensor, ranks: Tensor) -> None:
        """`addresses` [layers, parts, 2, rank] and `ranks` [layers, parts], as `expert_parts` orders
        them, on the device."""
        rank = addresses.shape[-1]
        most = -(-rank // 16) * 16
        if most > self.rows.shape[-1]:
            self.rows = F.pad(self.rows, (0, most - self.rows.shape[-1]))
        shape = self.rows.shape[0], self.groups, len(_SIDES)
        self.rows[:, slot, ..., :rank] = addresses.view(*shape, 2, rank)
        self.ranks[:, slot] = ranks.view(shape)

    def clear(self, slot: int) -> None:
        self.ranks[:, slot] = 0

    def changes(self, layer: int, arena: Tensor, step: LoraStep) -> ExpertChanges:
        assert step.slots is not None
        rows, ranks = self.rows[layer].flatten(0, 1), self.ranks[layer].flatten(0, 1)
        sites = self._sites(rows, ranks, self._experts.intermediate)
        return ExpertChanges(arena, *sites, step.slots, self.groups, step.max_rank)

    def shared(self, layer: int) -> tuple[LoraSite, LoraSite]:
        """(gate and up, down) of the shared expert, by slot."""
        rows, ranks = self.rows[layer, :, -1], self.ranks[layer, :, -1]
        return self._sites(rows, ranks, self._experts.shared)

    def _sites(self, rows: Tensor, ranks: Tensor, size: int) -> tuple[LoraSite, LoraSite]:
        return (
            LoraSite(rows[:, :2], ranks[:, :2], self._inner[size], self._hidden, size),
            LoraSite(rows[:, 2:], ranks[:, 2:], self._outer, size, self._hidden),
        )


def pairs_of_places(changes: ExpertChanges, chosen: Tensor, places: Tensor, count: int) -> Tensor:
    """The pair of the choice at each place of the order; the number of pairs where it has no adapter or
    no expert. `chosen` [tokens, active], `places` [choices]: the number of the choice at each place."""
    choice = places.long()
    slot = changes.slots[choice // chosen.shape[1]].long()
    expert = chosen.flatten()[choice]
    pairs = len(changes.gate_up.rows)
    return torch.where((slot < 0) | (expert >= count), pairs, slot * changes.groups + expert)
