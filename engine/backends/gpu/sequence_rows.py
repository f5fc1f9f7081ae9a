"""Assigns sequences to rows of the block table and of the last-token list on the device."""

from collections.abc import Sequence

from engine.backends.gpu.attention_reference import Answers
from engine.backends.gpu.part_tables import PartTables
from engine.batch import AnswerSight, Row

Change = tuple[int, int, int]  # row, column, block
_Known = tuple[int, int, int, AnswerSight | None]
_UNKNOWN: _Known = (0, 0, 0, None)
_NEVER = 1 << 30  # the first position of an answer that is not known yet


class SequenceRows:
    """Assigns rows, and lists the cells of the device's table that a step must update.

    A sequence keeps its row while it lives; with more sequences than rows, the least recently run
    one loses its row and gets another when it runs again.
    """

    def __init__(
        self, capacity: int, answers: Answers | None = None, parts: PartTables | None = None
    ) -> None:
        """`answers`: where the kept blocks stand that answers see; `parts`: where the pages
        of blocks' parts stand."""
        self._answers = answers
        self._parts = parts if parts is not None and parts.count else None
        self._rows: dict[int, int] = {}  # sequence -> row, least recently used first
        # Of each row: the version of the table, and how many of its blocks and of their parts and which
        # sight of its answer the device has.
        self._known: list[_Known] = [_UNKNOWN] * capacity
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
            version, known, parts, sight = self._known[assign]
            if version != row.table_version:
                known = parts = 0
            if known < len(row.blocks):
                changes += [(assign, n, row.blocks[n]) for n in range(known, len(row.blocks))]
            if self._answers is not None and (known == 0 or sight != row.answer):
                cells = _cells(row, self._answers)
                changes += [(assign, self._answers.column + n, each) for n, each in cells]
            if self._parts is not None:
                span = self._parts.span(row)
                fresh = range(max(parts, span.start), span.stop)
                changes += [(assign, *each) for each in self._parts.cells(row.blocks, fresh)]
                parts = max(parts, span.stop)
            self._known[assign] = row.table_version, len(row.blocks), parts, row.answer
        return sequence_rows, changes

    def forget(self, seq: int) -> None:
        assign = self._rows.pop(seq, None)
        if assign is not None:
            self._known[assign] = _UNKNOWN
            self._free.append(assign)

    def _take(self, seq: int) -> int:
        if not self._free:
            self.forget(next(iter(self._rows)))
        self._rows[seq] = self._free.pop()
        return self._rows[seq]


def _cells(row: Row, answers: Answers) -> list[tuple[int, int]]:
    """What the table has of the blocks that stay for the row's answer, by the columns after the first of
    `answers`."""
    if row.answer is None:
        return [(0, _NEVER), (1, 0)]
    numbers = row.answer.blocks
    found = [(0, row.answer.start), (1, len(numbers))]
    found += [(2 + n, row.blocks[number]) for n, number in enumerate(numbers)]
    return found + [(2 + answers.blocks + n, number) for n, number in enumerate(numbers)]
