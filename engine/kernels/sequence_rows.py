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
        # Of each row: the version of the table and how many of its blocks the device has.
        self._known = [(0, 0)] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    def assign(self, step: Sequence[Row]) -> tuple[list[int], list[Change]]:
        """The row of each sequence of the step, and the table cells to write before it runs."""
        for row in step:  # known sequences first, so that none of them loses its row below
            if row.seq in self._rows:
                self._rows[row.seq] = self._rows.pop(row.seq)
        sequence_rows = []
        changes: list[Change] = []
        for row in step:
            assign = self._rows.get(row.seq)
            if assign is None:
                assign = self._take(row.seq)
            sequence_rows.append(assign)
            version, known = self._known[assign]
            if version != row.table_version:
                known = 0
            if known < len(row.blocks):
                changes += [(assign, n, row.blocks[n]) for n in range(known, len(row.blocks))]
            self._known[assign] = row.table_version, len(row.blocks)
        return sequence_rows, changes

    def forget(self, seq: int) -> None:
        assign = self._rows.pop(seq, None)
        if assign is not None:
            self._known[assign] = 0, 0
            self._free.append(assign)

    def _take(self, seq: int) -> int:
        if not self._free:
            self.forget(next(iter(self._rows)))
        self._rows[seq] = self._free.pop()
        return self._rows[seq]
