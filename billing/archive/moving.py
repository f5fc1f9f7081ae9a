"""Moves months of raw rows to the archive before retention drops them.

The rows are dropped in the transaction that has counted both sides and found them equal, so a failure
at any point leaves them in PostgreSQL, and the next run stores them again.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.archive.base import RawArchive, Totals
from billing.archive.columns import CHARGE_COLUMNS, EVENT_COLUMNS
from billing.models import Charge, UsageEventRow
from core.errors import Conflict

_ROWS = 50_000
_E, _C = UsageEventRow, Charge


def archive_rows(session: Session, archive: RawArchive, first: str, below: str) -> int:
    """Store the rows with these ids; returns the number of events. Conflict if the sums differ."""
    inside = (_E.request_id >= first, _E.request_id < below)
    events = select(*(getattr(_E, name) for name in EVENT_COLUMNS)).where(*inside)
    for rows in _parts(session, events):
        archive.store(rows, ())
    charged = select(*(getattr(_C, name) for name in CHARGE_COLUMNS[:-1]), _E.occurred_at)
    joined = charged.join(_E, _E.request_id == _C.request_id).where(*inside)
    for rows in _parts(session, joined):
        archive.store((), rows)
    ours, theirs = totals(session, first, below), archive.totals(first, below)
    if ours != theirs:
        raise Conflict(
            f"The archive does not hold what the database holds: {theirs} instead of {ours}.",
            next_step="Nothing was dropped. Check the ClickHouse server; the next run tries again.",
        )
    return ours.events


def totals(session: Session, first: str, below: str) -> Totals:
    inside = (_E.request_id >= first, _E.request_id < below)
    tokens = _E.input_tokens + _E.output_tokens + _E.waived_tokens
    events, used = session.execute(select(func.count(), func.sum(tokens)).where(*inside)).one()
    # A charge whose event is elsewhere is not moved, and not dropped either.
    charged = select(func.count(), func.sum(_C.amount)).join(_E, _E.request_id == _C.request_id)
    charges, units = session.execute(charged.where(*inside)).one()
    return Totals(int(events), int(used or 0), int(charges), int(units or 0))


def _parts(session: Session, query: Any) -> Any:
    found = session.execute(query.execution_options(yield_per=_ROWS))
    for part in found.partitions():
        rows: Sequence[Sequence[Any]] = [tuple(row) for row in part]
        yield rows
