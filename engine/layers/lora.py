"""LoRA on a CPU: adapters in stacks by rank, added to the base layers by batched products.

An adapter's rows are one slice of the step, because rows are sorted by slot of the stack. A group
of slots is one product for all its adapters, so that many adapters need few more calls than one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.layers.host_memory import lazy_zeros, release
from engine.layers.matrices import SITES, part_shape, sites_of
from engine.model_spec import ModelSpec

# By (layer, part): A [rank, in] and B [rank, out], scaling included.
Matrices = Mapping[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive slots of one stack, and the step's rows first:end that belong to them.

    Every slot has `width` rows; where some have fewer, `gather` pads them (`width` row numbers per
    slot) and `scatter` is the index of each real row in the padded result.
    """

    rank: int
    slots: slice
    width: int
    first: int
    end: int
    gather: torch.Tensor | None = None
    scatter: torch.Tensor | None = None


class LoraStack:
    """All slots of one rank: for each layer A by site [slots, parts * rank, in] and B by part
    [slots, rank, out], the order in which few rows multiply fastest. Memory is allocated when a
    slot is written and released when it is cleared.
    """

    def __init__(self, spec: ModelSpec, slots: int, rank: int, dtype: torch.dtype) -> None:
        self.rank = rank
        self.sites: set[str] = set()  # sites that any adapter stored here has changed
        self.a: list[dict[str, torch.Tensor]] = []
        self.b: list[dict[str, torch.Tensor]] = []
        for layer in range(spec.layers):
            self.a.append({})
            self.b.append({})
            for site, parts in sites_of(spec, layer).items():
                width = part_shape(spec, parts[0])[0]
                self.a[-1][site] = lazy_zeros((slots, len(parts) * rank, width), dtype)
                for part in parts:
                    self.b[-1][part] = lazy_zeros((slots, rank, part_shape(spec, part)[1]), dtype)

    def store(self, slot: int, matrices: Matrices) -> None:
        rank = self.rank
        for layer, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            for site in a:
                for number, part in enumerate(SITES[site]):
                    rows = a[site][slot, number * rank : (number + 1) * rank]
                    outputs = b[part][slot]
                    pair = matrices.get((layer, part))
                    if pair is None or pair[0].shape[0] < rank:
                        rows.zero_()
                        outputs.zero_()
                    if pair is not None:
                        self.sites.add(site)
                        rows[: pair[0].shape[0]] = pair[0]
                        outputs[: pair[1].shape[0]] = pair[1]

    def move(self, source: int, target: int) -> None:
        for tensor in self._tensors():
            tensor[target] = tensor[source]

    def swap(self, one: int, other: int) -> None:
        for tensor in self._tensors():
            saved = tensor[one].clone()
            tensor[one] = tensor[other]
            tensor[other] = saved

    def clear(self, slot: int) -> None:
        for tensor in self._tensors():
            release(tensor[slot])

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for layer in (*self.a, *self.b) for tensor in layer.values()]


def stack_bytes(spec: ModelSpec, rank: int, dtype: torch.dtype) -> int:
    """Bytes of one adapter of this rank in its stack."""
    elements = sum(
        sum(part_shape(spec, part))
        for layer in range(spec.layers)
        for parts in sites_of(spec, layer).values()
        for part in parts
    )
    return rank * elements * dtype.itemsize


class LoraStep:
    """The adapters of one step, added at every site of every layer."""

    def __init__(self, stacks: dict[int, LoraStack], groups: list[Group]) -> None:
        self._stacks = stacks
        self._groups = groups

    def add_(self, layer: int, site: str, x: torch.Tensor, *outputs: torch.Tensor) -> None:
        """outputs [tokens, out], one per part of the site, += the adapters' products with x."""
        for group in self._groups:
            stack = self._stacks[group.rank]
            if site in stack.sites:
                a = stack.a[layer][site][group.slots]
                b = [stack.b[layer][part][group.slots] for part in SITES[site]]
                _add_group(group, x, a, b, outputs)


def _add_group(
    group: Group,
    x: torch.Tensor,
    a: torch.Tensor,
    b: list[torch.Tensor],
    outputs: tuple[torch.Tensor, ...],
) -> None:
    slots, width, rank = a.shape[0], group.width, group.rank
    if group.gather is None:
        rows = x[group.first : group.end]
    else:
        rows = x.index_select(0, group.gather)
    inner = torch.bmm(rows.view(slots, width, -1), a.transpose(1, 2))
    for number, (matrix, output) in enumerate(zip(b, outputs, strict=True)):
        share = inner[:, :, number * rank : (number + 1) * rank]
        target = output[group.first : group.end]
        if group.scatter is None:
            target.view(slots, width, -1).baddbmm_(share, matrix)
        else:
            padded = torch.bmm(share, matrix)
            target.add_(padded.flatten(0, 1).index_select(0, group.scatter))
