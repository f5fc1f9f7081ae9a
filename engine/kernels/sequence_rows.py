"""Assigns sequences to rows of the block table and of the last-token list on the device."""

from collections.abc import Sequence

from engine.batch import Row

Change = tuple[int, int, int]  # row, column, block


class SequenceRows:
    """Assigns rows, and lists the cells of the device's table that a step must update.

    A sequence keeps its row while it lives; with more sequences than rows, the least recently run
    one loses its row and gets another when it runs again.
    """

    def __init__(self, capacity: int) -> None:
        self._rows: dict[int, int] = {}  # sequence -> row, least recently used first
        self._held: list[list[int]] = [[] for _ in range(capacity)]
        self._free = list(range(capacity - 1, -1, -1))

    def place(self, step: Sequence[Row]) -> tuple[list[int], list[Change]]:
        """The row of each sequence of the step, and the table cells to write before it runs."""
        for row in step:  # known sequences first, so that none of them loses its row below
            if row.seq in self._rows:
                self._rows[row.seq] = self._rows.pop(row.seq)
        places = []
        changes: list[Change] = []
        for row in step:
            place = self._rows.get(row.seq)
            if place is None:
                place = self._take(row.seq)
            places.append(place)
            held = self._held[place]
            if row.blocks[: len(held)] != held:
                held.clear()
            new = row.blocks[len(held) :]
            changes += [(place, len(held) + i, block) for i, block in enumerate(new)]
            held += new
        return places, changes

    def forget(self, seq: int) -> None:
        place = self._rows.pop(seq, None)
        if place is not None:
            self._held[place].clear()
            self._free.append(place)

    def _take(self, seq: int) -> int:
        if not self._free:
            self.forget(next(iter(self._rows)))
        self._rows[seq] = self._free.pop()
        return self._rows[seq]
