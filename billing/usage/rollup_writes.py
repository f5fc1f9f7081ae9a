"""Roll-ups written by the database itself: sums selected from events are added to rows that exist."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from billing.columns import AMOUNT_COLUMNS, PLAIN_SUMS, QUANTITY_COLUMNS
from billing.usage.tables import UsageEventRow
from core.database import WholeSum


def add_from(
    session: Session,
    table: Any,
    key: Sequence[str],
    others: Sequence[str],
    sums: Sequence[str],
    rows: Any,
) -> None:
    """Insert `rows`, a select of `key`, `others` and `sums` in this order, or add to what is there."""
    postgres = session.get_bind().dialect.name == "postgresql"
    make: Any = postgresql.insert if postgres else sqlite.insert
    target = table.__table__
    made = make(target).from_select([*key, *others, *sums], rows)
    raised = {name: WholeSum(target.c[name], made.excluded[name]) for name in sums}
    session.execute(made.on_conflict_do_update(index_elements=list(key), set_=raised))


@dataclass(frozen=True, slots=True)
class Contents:
    """What the chosen events have."""

    columns: tuple[str, ...]  # of their charges; the others are zero
    labels: bool


def contents_of(session: Session, chosen: ColumnElement[bool]) -> Contents:
    event = UsageEventRow
    divided, measured, labels = session.execute(
        select(
            func.count(event.components),
            func.max(case((event.units != 0, 1), else_=0)),
            func.count(event.labels),
        ).where(chosen)
    ).one()
    is_plain = not divided and not measured
    columns = PLAIN_SUMS if is_plain else (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)
    return Contents(columns, bool(labels))


def start_of(width: str, session: Session) -> Any:
    """The start of the hour or day of an event."""
    if session.get_bind().dialect.name == "postgresql":
        return func.date_trunc(width, UsageEventRow.occurred_at)
    form = "%Y-%m-%d %H:00:00.000000" if width == "hour" else "%Y-%m-%d 00:00:00.000000"
    return func.strftime(form, UsageEventRow.occurred_at)
