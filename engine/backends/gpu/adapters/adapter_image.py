"""The content of the blocks of an adapter, made on the host: rows of elements, each whole in a block."""

import math

import torch
from torch import Tensor

from engine.backends.gpu.adapters.lora_reference import UNIT


class AdapterImage:
    """Rows are placed one after the other; one that does not fit the rest of a block begins the next."""

    def __init__(self, block_elements: int) -> None:
        self.units = units_of(block_elements)  # of a block
        self._block_elements = block_elements
        self._block, self._unit = 0, 0
        self._runs: list[tuple[int, int, Tensor]] = []  # block, first unit, rows from there on

    def add(self, rows: Tensor) -> Tensor:
        """Places `rows` [count, elements]; returns the offset of each in the image, in units. Raises
        ValueError for rows that are longer than a block."""
        width = -(-rows.shape[1] // UNIT)
        if width > self.units:
            raise ValueError(
                f"a row of {rows.shape[1]} elements does not fit a block of {self._block_elements}: "
                "use a larger block size"
            )
        offsets = torch.zeros(rows.shape[0], dtype=torch.int32)
        done = 0
        while done < rows.shape[0]:
            count = min((self.units - self._unit) // width, rows.shape[0] - done)
            if count == 0:
                self._block, self._unit = self._block + 1, 0
                continue
            first = self._block * self.units + self._unit
            offsets[done : done + count] = torch.arange(first, first + count * width, width)
            self._runs.append((self._block, self._unit, rows[done : done + count]))
            done, self._unit = done + count, self._unit + count * width
        return offsets

    def filled(self, dtype: torch.dtype, pinned: bool) -> Tensor:
        """[blocks, elements of their units]"""
        size = self._block + 1, self.units * UNIT
        image = torch.zeros(size, dtype=dtype, pin_memory=pinned)
        for block, unit, rows in self._runs:
            width = -(-rows.shape[1] // UNIT) * UNIT
            place = image[block, unit * UNIT : unit * UNIT + rows.shape[0] * width]
            place.view(-1, width)[:, : rows.shape[1]] = rows
        return image


def units_of(block_elements: int) -> int:
    """Whole units in any block of an arena. A block that does not begin at a unit's beginning is used
    from the next one on."""
    return (block_elements - UNIT + math.gcd(block_elements, UNIT)) // UNIT


def first_units(blocks: Tensor, block_elements: int) -> Tensor:
    """The arena's unit at which each block is used."""
    return (blocks * block_elements + UNIT - 1) // UNIT


def places_in_blocks(offsets: Tensor, image: Tensor, blocks: Tensor, block_elements: int) -> Tensor:
    """The arena's unit, int32, for each offset in the image. `blocks`: the arena's block for each of the
    image's, on the host."""
    units = image.shape[1] // UNIT
    wide = offsets.long()
    return (first_units(blocks, block_elements)[wide // units] + wide % units).int()
