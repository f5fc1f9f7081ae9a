"""What this engine's own steps took, in a small table: by kind, rows, context and prompt tokens.

A cell is a power of two in each, so that some hundred cells hold every step. Sums of what was counted
stand in it, and a plan of this engine is fitted to their means (`engine.planning.own_steps`).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from engine.batch import Row
from engine.scheduling.sequence import Sequence

MOST_CELLS = 512


@dataclass(slots=True)
class Cell:
    """Sums over its steps; divided by `steps`, a step's means."""

    steps: int = 0
    seconds: float = 0.0
    rows: int = 0  # sequences that decode
    positions: int = 0  # before them, in all
    tokens: int = 0  # of prompts
    before: int = 0  # positions before these, of the prompt that is farthest


class StepTable:
    def __init__(self) -> None:
        self.cells: dict[tuple[int, int, int], Cell] = {}

    def record(self, rows: list[tuple[Sequence, Row]], seconds: float) -> None:
        decoding = positions = tokens = before = 0
        for _, row in rows:
            count = len(row.tokens)
            if row.start >= row.prompt_len:
                decoding += 1
                positions += row.start
            else:
                tokens += count
                before = max(before, row.start)
        key = (decoding.bit_length(), positions.bit_length(), tokens.bit_length())
        cell = self.cells.get(key)
        if cell is None:
            if len(self.cells) >= MOST_CELLS:
                return
            cell = self.cells[key] = Cell()
        cell.steps += 1
        cell.seconds += seconds
        cell.rows += decoding
        cell.positions += positions
        cell.tokens += tokens
        cell.before += before

    def samples(self) -> Iterator[tuple[dict[str, str], dict[str, float]]]:
        """Sums with the labels of their metric. Safe to call from another thread."""
        for (rows, positions, tokens), cell in list(self.cells.items()):
            kind = "mixed" if rows and tokens else "prompt" if tokens else "decode"
            labels = {"kind": kind, "rows": _below(rows), "positions": _below(positions)}
            yield labels | {"prompt": _below(tokens)}, asdict(cell)


def _below(bits: int) -> str:
    """The number that all of a cell are below, a power of two; 0 for none."""
    return str((1 << bits) if bits else 0)
