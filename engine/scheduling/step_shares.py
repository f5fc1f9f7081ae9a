"""Divides the measured time of a step among its requests, by the work of their rows.

The work of a row is counted in bytes that the device moves: its tokens' share of the weights, which a
step reads once; the keys and values that it reads; and its floating-point operations, through the
weights and in attention, as the bytes that the device could have moved meanwhile. A token far into a
long context therefore takes more of a step than one at the start of a short one.
"""

from engine.batch import ModelWork, Row
from engine.scheduling.sequence import Sequence


def share_time(rows: list[tuple[Sequence, Row]], elapsed_s: float, work: ModelWork) -> None:
    """Add to each row's request its share of the step's seconds. The shares add up to them."""
    tokens = sum(len(row.tokens) for _, row in rows)
    parts = [work.of_row(row, tokens) for _, row in rows]
    per_work = elapsed_s / sum(parts)
    for (seq, _), part in zip(rows, parts, strict=True):
        seq.request.busy_s += part * per_work
