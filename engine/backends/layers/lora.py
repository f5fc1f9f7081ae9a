"""LoRA on a CPU: adapters in stacks by rank, added to the base layers by batched products.

An adapter's rows are one slice of the step, because rows are sorted by slot of the stack. A group
of slots is one product for all its adapters, so that many adapters need few more calls than one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from engine.backends.layers.adapter_extras import ExtraRows, Rescale, rescales
from engine.backends.layers.host_memory import lazy_zeros, release
from engine.backends.layers.matrices import SITE_OF, part_shape, sites_of
from engine.backends.layers.operations import Site
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
        # What the stored adapters change; many leave out layers, or one of a site's parts.
        self.parts: frozenset[tuple[int, str]] = frozenset()
        self.sites: frozenset[tuple[int, str]] = frozenset()
        self._changed: dict[int, frozenset[tuple[int, str]]] = {}  # parts, by slot
        self.a: list[dict[str, torch.Tensor]] = []
        self.b: list[dict[str, torch.Tensor]] = []
        self.layout = [sites_of(spec, layer) for layer in range(spec.layers)]  # parts of sites
        for sites in self.layout:
            self.a.append({})
            self.b.append({})
            for site, parts in sites.items():
                width = part_shape(spec, parts[0])[0]
                self.a[-1][site] = lazy_zeros((slots, len(parts) * rank, width), dtype)
                for part in parts:
                    self.b[-1][part] = lazy_zeros((slots, rank, part_shape(spec, part)[1]), dtype)

    def store(self, slot: int, matrices: Matrices) -> None:
        rank = self.rank
        for layer, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            for site in a:
                for number, part in enumerate(self.layout[layer][site]):
                    rows = a[site][slot, number * rank : (number + 1) * rank]
                    outputs = b[part][slot]
                    pair = matrices.get((layer, part))
                    if pair is None or pair[0].shape[0] < rank:
                        rows.zero_()
                        outputs.zero_()
                    if pair is not None:
                        rows[: pair[0].shape[0]] = pair[0]
                        outputs[: pair[1].shape[0]] = pair[1]
        self._changed[slot] = frozenset(matrices)
        self._collect()

    def move(self, source: int, target: int) -> None:
        for tensor in self._tensors():
            tensor[target] = tensor[source]
        self._changed[target] = self._changed.get(source, frozenset())
        self._collect()

    def swap(self, one: int, other: int) -> None:
        for tensor in self._tensors():
            saved = tensor[one].clone()
            tensor[one] = tensor[other]
            tensor[other] = saved
        changed, none = self._changed, frozenset[tuple[int, str]]()
        changed[one], changed[other] = changed.get(other, none), changed.get(one, none)

    def clear(self, slot: int) -> None:
        for tensor in self._tensors():
            release(tensor[slot])
        self._changed.pop(slot, None)
        self._collect()

    def changes(self, slot: int, layer: int, part: str) -> bool:
        """Whether the adapter in `slot` changes that part."""
        return (layer, part) in self._changed[slot]

    def _collect(self) -> None:
        self.parts = frozenset[tuple[int, str]]().union(*self._changed.values())
        self.sites = frozenset((layer, SITE_OF[part]) for layer, part in self.parts)

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

    def __init__(
        self,
        stacks: dict[int, LoraStack],
        groups: list[Group],
        extras: list[ExtraRows] | None = None,
    ) -> None:
        self._stacks = stacks
        self._groups = groups
        self.extras = extras or []

    def change_(self, layer: int, site: str, x: torch.Tensor, *outputs: torch.Tensor) -> None:
        """outputs [tokens, out], one per part of the site: the base's products with x become those of
        each row's adapter."""
        if self.extras:
            for part, output in zip(self._parts(layer, site), outputs, strict=True):
                for rows, rescale in rescales(self.extras, layer, part):
                    rescale(output[rows])
        self.add_(layer, site, x, *outputs)

    def rescales(self, layer: int, part: str) -> Iterator[tuple[slice, Rescale]]:
        """The rows whose adapters rescale the base's outputs there."""
        return rescales(self.extras, layer, part)

    def _parts(self, layer: int, site: str) -> tuple[str, ...]:
        return next(iter(self._stacks.values())).layout[layer][site]

    def product(
        self,
        site: Site,
        x: torch.Tensor,
        other: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> torch.Tensor | None:
        """The site's product with x, changed, plus `other`, or of a gated site its activated gate times
        the other part; None where the base's product has to be computed first."""
        return None

    def add_(self, layer: int, site: str, x: torch.Tensor, *outputs: torch.Tensor) -> None:
        """outputs [tokens, out], one per part of the site, += the adapters' products with x."""
        for group in self._groups:
            stack = self._stacks[group.rank]
            if (layer, site) in stack.sites:
                inner = _inner(group, x, stack.a[layer][site][group.slots])
                parts = stack.layout[layer][site]
                for number, (part, output) in enumerate(zip(parts, outputs, strict=True)):
                    if (layer, part) in stack.parts:
                        first = number * group.rank
                        share = inner[:, :, first : first + group.rank]
                        _add_part(group, share, stack.b[layer][part][group.slots], output)

    def changes(self, layer: int, site: str) -> bool:
        return any((layer, site) in self._stacks[group.rank].sites for group in self._groups)


def _inner(group: Group, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """x A^T, [slots, width, parts * rank]"""
    rows = x[group.first : group.end] if group.gather is None else x.index_select(0, group.gather)
    return torch.bmm(rows.view(a.shape[0], group.width, -1), a.transpose(1, 2))


def _add_part(group: Group, share: torch.Tensor, b: torch.Tensor, output: torch.Tensor) -> None:
    target = output[group.first : group.end]
    if group.scatter is None:
        target.view(b.shape[0], group.width, -1).baddbmm_(share, b)
    else:
        padded = torch.bmm(share, b)
        target.add_(padded.flatten(0, 1).index_select(0, group.scatter))
