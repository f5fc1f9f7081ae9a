"""A mixture of experts: choices sorted by expert, two products in which a program has one expert, and the
sum of each token's choices. Nothing is read by the host: the grid is as large as the most chunks that so
many choices can have. The reference is `mixture_reference`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.gpu.adapters.expert_adapters import ExpertChanges, pairs_of_places
from engine.backends.gpu.adapters.lora_launch import add_lora
from engine.backends.gpu.adapters.lora_reference import LoraStep
from engine.backends.gpu.formats.experts import clamped_kernel, sum_choices_kernel
from engine.backends.gpu.formats.launch import FEW, Sorted, product
from engine.backends.gpu.launch import power_of_two
from engine.backends.gpu.pointwise_launch import gated
from engine.backends.layers.device.mixture import DeviceMixture

_MANY = 64  # rows of a chunk where experts have that many


@dataclass(frozen=True, slots=True)
class Choices:
    """`by_expert` is the order of the products; `place` [tokens, active] says where in it a choice is."""

    by_expert: Sorted
    place: Tensor
    counts: Tensor  # [experts] int64


def experts(
    mixture: DeviceMixture,
    x: Tensor,
    real: Tensor,
    activation: str,
    changes: ExpertChanges | None = None,
) -> Tensor:
    """The weighted sum of the chosen experts, without the shared one: [tokens, hidden]. Tokens that are
    not `real` [tokens] (a graph's padding) use none, and get zeros. `changes`: of adapters."""
    shares, chosen = mixture.router(x)
    chosen = chosen.masked_fill(~real[:, None], mixture.count)
    choices = sort_choices(chosen, mixture.count)
    if mixture.load is not None:
        mixture.load.add_(choices.counts)
    total, order = chosen.numel(), choices.by_expert
    # Zeros at places of no expert, which the gate reads too.
    both = torch.zeros(total, mixture.gate_up.out, dtype=x.dtype, device=x.device)
    product(x, mixture.gate_up, both, order)
    lora = None
    if changes is not None:
        lora = _by_adapter(changes, chosen, order, mixture.count)
        given = x.index_select(0, order.places.long() // order.active)
        add_lora(both, given, changes.arena, changes.gate_up, lora)
    inner = _gated(both, activation, mixture.clamp)
    found = torch.empty(total, mixture.down.out, dtype=x.dtype, device=x.device)
    at_places = Sorted(order.chunks, order.places, order.rows, order.active, by_token=False)
    product(inner, mixture.down, found, at_places)
    if changes is not None and lora is not None:
        add_lora(found, inner, changes.arena, changes.down, lora)
    return combine(found, shares, chosen, choices.place, mixture.count)


def sort_choices(chosen: Tensor, count: int) -> Choices:
    """`chosen` [tokens, active]: experts by number; `count` stands for none."""
    device, total, active = chosen.device, chosen.numel(), chosen.shape[1]
    size = FEW if total <= FEW * count else _MANY
    expert, order = chosen.flatten().sort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(total, device=device))
    table, counts = _chunks(expert, count, size)
    by_expert = Sorted(table, order.int(), size, active, by_token=True)
    return Choices(by_expert, place.int().view_as(chosen), counts)


def _by_adapter(changes: ExpertChanges, chosen: Tensor, order: Sorted, count: int) -> LoraStep:
    """Places in the order of experts, by their adapter and expert."""
    pairs, most = pairs_of_places(changes, chosen, order.places, count), len(changes.gate_up.rows)
    size = FEW if len(pairs) <= FEW * count else _MANY
    key, places = pairs.sort(stable=True)
    return LoraStep(places.int(), _chunks(key, most, size)[0], size, changes.max_rank)


def _chunks(keys: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Chunks [most, 3] (key, first place, places; 0: none) of at most `size` places of one key below
    `count`, and how many places each key has. `keys` [places] are sorted."""
    device, total = keys.device, len(keys)
    # Where each key begins in the order, and its chunks among all.
    bounds = torch.searchsorted(keys, torch.arange(count + 1, device=device))
    counts = bounds[1:] - bounds[:-1]
    chunks = (counts + size - 1) // size
    ends = chunks.cumsum(0)
    number = torch.arange(min(count, total) + total // size, device=device)
    owner = torch.searchsorted(ends, number, right=True)
    held = owner.clamp(max=count - 1)
    first = (number - (ends - chunks)[held]) * size
    used = (counts[held] - first).clamp(0, size) * (owner < count)
    return torch.stack((held, bounds[held] + first, used), 1).int(), counts


def combine(found: Tensor, shares: Tensor, chosen: Tensor, place: Tensor, count: int) -> Tensor:
    """The sum of each token's choices: [tokens, width]."""
    tokens, active = chosen.shape
    width = found.shape[1]
    out = torch.empty(tokens, width, dtype=found.dtype, device=found.device)
    block = min(1024, power_of_two(width))
    sum_choices_kernel[(tokens, -(-width // block))](
        out, found, shares, chosen, place, WIDTH=width, ACTIVE=active, EXPERTS=count, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


def _gated(both: Tensor, activation: str, clamp: tuple[float, float] | None) -> Tensor:
    if clamp is None:
        return gated(both, gelu=activation != "silu")
    rows, width = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, width, dtype=both.dtype, device=both.device)
    block = min(1024, power_of_two(width))
    clamped_kernel[(rows, -(-width // block))](
        out, both, both.stride(0), *clamp, WIDTH=width, BLOCK=block, num_warps=4
    )
    return out
