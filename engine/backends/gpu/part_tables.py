"""The tables of layers with a window whose parts of blocks lie in pages (`engine.cache.windowed`)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Row
from engine.cache.parts import Windowed
from engine.errors import IntegrityError

_ALIGN = 4  # elements: Triton recompiles for a pointer that is not aligned to 16 bytes
Ints = NDArray[np.int32]


class PartTables:
    """A table for each page of a part. They stand in a sequence's row of the device's table, from
    `column` on, so that what changes in them is written with its blocks. A page that the window has
    passed stays in its cell, and is not read: attention begins at the window."""

    def __init__(
        self, windowed: Windowed | None, column: int, blocks: int, block_size: int
    ) -> None:
        """`blocks`: the most that a sequence has."""
        self._windowed = windowed
        self._size = block_size
        self._first = -(-column // _ALIGN) * _ALIGN
        self._stride = -(-blocks // _ALIGN) * _ALIGN
        self.count = 0 if windowed is None else windowed.part
        self.width = self._first + self.count * self._stride if self.count else column

    def span(self, row: Row) -> range:
        """Which of the row's blocks have parts that it reads or writes."""
        if self._windowed is None:
            return range(0)
        first = self._windowed.sight.unread_blocks(row.start, self._size).stop
        return range(first, -(-row.position // self._size))

    def cells(self, blocks: Sequence[int], numbers: range) -> list[tuple[int, int]]:
        """The columns, and what they have of these of the sequence's blocks."""
        if self._windowed is None or not numbers:
            return []
        pages = self._windowed.pages[blocks[numbers.start : numbers.stop]]
        if (pages < 0).any():
            raise IntegrityError("a sequence reads or writes a block without its part")
        return [
            (self._first + table * self._stride + number, page)
            for table, column in enumerate(pages.T.tolist())
            for number, page in zip(numbers, column, strict=True)
        ]

    def slots(self, slots: Ints) -> list[Ints]:
        """Where each page of a part is written, for slots of blocks; negative ones stay."""
        if self._windowed is None:
            return []
        blocks, at = np.divmod(slots, np.int32(self._size))
        pages = self._windowed.pages[np.maximum(blocks, 0)].T
        return [
            np.where(slots < 0, slots, each * self._size + at).astype(np.int32) for each in pages
        ]

    def views(self, tables: Tensor) -> list[Tensor]:
        starts = (self._first + table * self._stride for table in range(self.count))
        return [tables[:, start:] for start in starts]
