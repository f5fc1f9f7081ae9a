"""Adapters in whole blocks of the KV cache: packed on the host, addressed through a table.

Every rank row of A and every column of B is a contiguous run of elements inside one block. The
table holds the offset of each row, so an adapter can lie in any blocks, in any order.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.expert_adapters import ExpertTable, expert_parts
from engine.kernels.lora_reference import UNIT, LoraSite
from engine.layers.matrices import PARTS, part_shape, sites_of
from engine.layers.transfer import on_device, send
from engine.model_spec import ModelSpec

Matrices = Mapping[tuple[int, str], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """The content of an adapter's blocks, and the offset of each rank row in them."""

    image: Tensor  # [blocks, elements of their units], on the host
    # Parts are those of `PARTS`, then perhaps those of experts.
    offsets: Tensor  # [layers, parts, 2, max rank] int32: offset in the image, in units
    ranks: Tensor  # [layers, parts] int32

    @property
    def of_experts(self) -> bool:
        return self.ranks.shape[1] > len(PARTS)


def units_of(block_elements: int) -> int:
    """Whole units in any block of an arena. A block that does not begin at a unit's beginning is used
    from the next one on."""
    return (block_elements - UNIT + math.gcd(block_elements, UNIT)) // UNIT


def first_units(blocks: Tensor, block_elements: int) -> Tensor:
    """The arena's unit at which each block is used."""
    return (blocks * block_elements + UNIT - 1) // UNIT


def pack_adapter(
    matrices: Matrices,
    layers: int,
    block_elements: int,
    dtype: torch.dtype,
    *,
    pinned: bool = False,
    names: tuple[str, ...] = PARTS,
) -> PackedAdapter:
    """`matrices` holds A [rank, in] and B [rank, out], scaling included, by (layer, part). `names`: of
    the parts."""
    largest_rank = max((a.shape[0] for a, _ in matrices.values()), default=0)
    shape, numbers = (layers, len(names)), {name: number for number, name in enumerate(names)}
    offsets = torch.zeros(*shape, 2, largest_rank, dtype=torch.int32)
    ranks = torch.zeros(shape, dtype=torch.int32)
    runs: list[tuple[int, int, Tensor]] = []  # block, first unit, rows from there on
    units, block, unit = units_of(block_elements), 0, 0
    for (layer, part), (a, b) in sorted(matrices.items()):
        number = numbers[part]
        ranks[layer, number] = a.shape[0]
        for side, rows in enumerate((a, b)):
            width = -(-rows.shape[1] // UNIT)
            if width > units:
                raise ValueError(
                    f"a row of {rows.shape[1]} elements does not fit a block of {block_elements}: "
                    "use a larger block size"
                )
            done = 0
            while done < rows.shape[0]:
                count = min((units - unit) // width, rows.shape[0] - done)
                if count == 0:
                    block, unit = block + 1, 0
                    continue
                first = block * units + unit
                filled = torch.arange(first, first + count * width, width)
                offsets[layer, number, side, done : done + count] = filled
                runs.append((block, unit, rows[done : done + count]))
                done, unit = done + count, unit + count * width
    image = torch.zeros(block + 1, units * UNIT, dtype=dtype, pin_memory=pinned)
    for block, unit, rows in runs:
        width = -(-rows.shape[1] // UNIT) * UNIT
        place = image[block, unit * UNIT : unit * UNIT + rows.shape[0] * width]
        place.view(-1, width)[:, : rows.shape[1]] = rows
    return PackedAdapter(image, offsets, ranks)


class AdapterTable:
    """The offsets of every slot's adapter in the arena, on the device."""

    def __init__(
        self, spec: ModelSpec, slots: int, max_rank: int, block_elements: int, device: torch.device
    ) -> None:
        shape = (slots, spec.layers, len(PARTS))
        self.rows = torch.zeros(*shape, 2, max_rank, dtype=torch.int32, device=device)
        self.ranks = torch.zeros(shape, dtype=torch.int32, device=device)
        self._block_elements = block_elements
        self.experts = ExpertTable(spec, slots, device) if expert_parts(spec) else None
        self._sites = [
            {name: self._site(spec, layer, parts) for name, parts in sites_of(spec, layer).items()}
            for layer in range(spec.layers)
        ]

    def site(self, layer: int, name: str) -> LoraSite:
        return self._sites[layer][name]

    def fill(self, slot: int, packed: PackedAdapter, blocks: Tensor) -> None:
        """`blocks`: the arena's block for each block of the image, on the host."""
        offsets, units = packed.offsets.long(), packed.image.shape[1] // UNIT
        addresses = first_units(blocks, self._block_elements)[offsets // units] + offsets % units
        places, ranks = (send(each, self.rows.device) for each in (addresses.int(), packed.ranks))
        few = len(PARTS)
        self.rows[slot, ..., : offsets.shape[-1]] = places[:, :few]
        self.ranks[slot] = ranks[:, :few]
        if packed.of_experts:
            assert self.experts is not None
            self.experts.fill(slot, places[:, few:], ranks[:, few:])

    def clear(self, slot: int) -> None:
        self.ranks[slot] = 0
        if self.experts is not None:
            self.experts.clear(slot)

    def _site(self, spec: ModelSpec, layer: int, parts: tuple[str, ...]) -> LoraSite:
        inputs, _ = part_shape(spec, parts[0])
        widths = [part_shape(spec, part)[1] for part in parts]
        spans = [(sum(widths[:i]), width) for i, width in enumerate(widths)]
        first = PARTS.index(parts[0])
        which = slice(first, first + len(parts))
        return LoraSite(
            rows=self.rows[:, layer, which],
            ranks=self.ranks[:, layer, which],
            spans=on_device(spans, self.rows.device, torch.int32),
            inputs=inputs,
            widest=max(widths),
        )
