"""Adapters in whole blocks of the KV cache: packed on the host, addressed through a table.

Every rank row of A and every column of B is a contiguous run of elements inside one block. The
table holds the offset of each row, so an adapter can lie in any blocks, in any order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.gpu.adapters.adapter_ends import Ends, PackedEnds, pack_ends
from engine.backends.gpu.adapters.adapter_image import AdapterImage, places_in_blocks
from engine.backends.gpu.adapters.expert_adapters import ExpertTable, expert_parts
from engine.backends.gpu.adapters.lora_reference import LoraSite
from engine.backends.layers.adapter_extras import AdapterExtras
from engine.backends.layers.matrices import LATENT_PARTS, PARTS, latent_shapes, part_shape, sites_of
from engine.backends.layers.transfer import on_device, send
from engine.model_spec import ModelSpec

Matrices = Mapping[tuple[int, str], tuple[Tensor, Tensor]]


# DoRA's factor and shift of a part's outputs, which are packed as an A and a B of rank 1.
FACTORS = tuple(f"{part}.factor" for part in PARTS)


def table_parts(spec: ModelSpec) -> tuple[str, ...]:
    """The matrices whose rows the table has."""
    return PARTS if spec.latent is None else PARTS + LATENT_PARTS


def packed_parts(spec: ModelSpec) -> tuple[str, ...]:
    """What an adapter may have of a layer, in the order of its table."""
    return table_parts(spec) + FACTORS + expert_parts(spec)


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """The content of an adapter's blocks, and the offset of each rank row in them."""

    image: Tensor  # [blocks, elements of their units], on the host
    # Parts are those of `table_parts`, then perhaps the rest of `packed_parts`.
    offsets: Tensor  # [layers, parts, 2, max rank] int32: offset in the image, in units
    ranks: Tensor  # [layers, parts] int32
    rescales: bool  # has DoRA's factors
    of_experts: bool  # has parts of experts
    ends: PackedEnds | None = None


def pack_adapter(
    matrices: Matrices,
    layers: int,
    block_elements: int,
    dtype: torch.dtype,
    *,
    pinned: bool = False,
    names: tuple[str, ...] = PARTS,
    extras: AdapterExtras | None = None,
) -> PackedAdapter:
    """`matrices` holds A [rank, in] and B [rank, out], scaling included, by (layer, part). `names`: of
    the parts. `extras`: with a token table or head of its own, perhaps."""
    largest_rank = max((a.shape[0] for a, _ in matrices.values()), default=0)
    shape, numbers = (layers, len(names)), {name: number for number, name in enumerate(names)}
    offsets = torch.zeros(*shape, 2, largest_rank, dtype=torch.int32)
    ranks = torch.zeros(shape, dtype=torch.int32)
    image = AdapterImage(block_elements)
    for (layer, part), (a, b) in sorted(matrices.items()):
        number = numbers[part]
        ranks[layer, number] = a.shape[0]
        for side, rows in enumerate((a, b)):
            offsets[layer, number, side, : rows.shape[0]] = image.add(rows)
    ends = None if extras is None else pack_ends(extras, image)
    found = {part for _, part in matrices}
    kinds = not found.isdisjoint(FACTORS), not found <= {*PARTS, *LATENT_PARTS, *FACTORS}
    return PackedAdapter(image.filled(dtype, pinned), offsets, ranks, *kinds, ends)


def factor_pairs(extras: AdapterExtras) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """DoRA's factors and shifts by (layer, name of `FACTORS`)."""
    return {
        (layer, f"{part}.factor"): (
            each.factor[None],
            (torch.zeros_like(each.factor) if each.shift is None else each.shift)[None],
        )
        for (layer, part), each in extras.rescales.items()
    }


class AdapterTable:
    """The offsets of every slot's adapter in the arena, on the device."""

    def __init__(
        self, spec: ModelSpec, slots: int, max_rank: int, block_elements: int, device: torch.device
    ) -> None:
        self._parts = table_parts(spec)
        shape = (slots, spec.layers, len(self._parts))
        self.rows = torch.zeros(*shape, 2, max_rank, dtype=torch.int32, device=device)
        self.ranks = torch.zeros(shape, dtype=torch.int32, device=device)
        # Of DoRA: as `rows`, and 1 where there are any.
        self._rescaled = self.ranks[..., : len(PARTS)].clone()
        self._factors = torch.zeros(*self._rescaled.shape, 2, 1, dtype=torch.int32, device=device)
        self.ends: dict[int, Ends] = {}  # token tables and heads, by slot
        self._block_elements = block_elements
        self.experts = ExpertTable(spec, slots, device) if expert_parts(spec) else None
        self._sites, self._rescales = (
            [
                {
                    name: _site(spec, layer, parts, *memory)
                    for name, parts in sites_of(spec, layer).items()
                }
                for layer in range(spec.layers)
            ]
            for memory in ((self.rows, self.ranks), (self._factors, self._rescaled))
        )
        for layer, sites in enumerate(self._sites):
            for name, shapes in latent_shapes(spec).items():
                which = self._parts.index(name)
                sites[name] = _slices(
                    self.rows, self.ranks, (layer, which, 1), shapes[0], [shapes[1]]
                )

    def site(self, layer: int, name: str) -> LoraSite:
        return self._sites[layer][name]

    def rescale(self, layer: int, name: str) -> LoraSite | None:
        """The factors and shifts of a site, as A and B of rank 1; None where DoRA is refused."""
        return self._rescales[layer].get(name)

    def fill(self, slot: int, packed: PackedAdapter, blocks: Tensor) -> None:
        """`blocks`: the arena's block for each block of the image, on the host."""
        addresses = places_in_blocks(packed.offsets, packed.image, blocks, self._block_elements)
        places, ranks = (send(each, self.rows.device) for each in (addresses, packed.ranks))
        few = len(self._parts)
        factors = few + len(FACTORS)
        self.rows[slot, ..., : places.shape[-1]] = places[:, :few]
        self.ranks[slot] = ranks[:, :few]
        if packed.rescales:
            self._factors[slot] = places[:, few:factors, :, :1]
            self._rescaled[slot] = ranks[:, few:factors]
        if packed.of_experts:
            assert self.experts is not None
            self.experts.fill(slot, places[:, factors:], ranks[:, factors:])
        if packed.ends is not None:
            self.ends[slot] = packed.ends.placed(
                lambda offsets: send(
                    places_in_blocks(offsets, packed.image, blocks, self._block_elements),
                    self.rows.device,
                )
            )

    def clear(self, slot: int) -> None:
        self.ranks[slot] = 0
        self._rescaled[slot] = 0
        self.ends.pop(slot, None)
        if self.experts is not None:
            self.experts.clear(slot)


def _site(
    spec: ModelSpec, layer: int, parts: tuple[str, ...], rows: Tensor, ranks: Tensor
) -> LoraSite:
    inputs, _ = part_shape(spec, parts[0])
    widths = [part_shape(spec, part)[1] for part in parts]
    return _slices(rows, ranks, (layer, PARTS.index(parts[0]), len(parts)), inputs, widths)


def _slices(
    rows: Tensor, ranks: Tensor, where: tuple[int, int, int], inputs: int, widths: list[int]
) -> LoraSite:
    """`where`: the layer, the first part and how many follow each other."""
    layer, first, count = where
    which = slice(first, first + count)
    spans = [(sum(widths[:i]), width) for i, width in enumerate(widths)]
    return LoraSite(
        rows=rows[:, layer, which],
        ranks=ranks[:, layer, which],
        spans=on_device(spans, rows.device, torch.int32),
        inputs=inputs,
        widest=max(widths),
    )
