"""Roll-ups written by the database itself: sums selected from events are added to rows that exist."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from billing.columns import AMOUNT_COLUMNS, PLAIN_AMOUNTS, PLAIN_QUANTITIES, QUANTITY_COLUMNS
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


def columns_of(session: Session, chosen: ColumnElement[bool]) -> tuple[str, ...]:
    """The columns of charges of these events that are not all zero: those of parts are where no event
    is divided."""
    divided = select(UsageEventRow.request_id).where(chosen, UsageEventRow.components.is_not(None))
    if session.scalar(divided.limit(1)) is None:
        return (*PLAIN_QUANTITIES, *PLAIN_AMOUNTS, "amount")
    return (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)


def start_of(width: str, session: Session) -> Any:
    """The start of the hour or day of an event."""
    if session.get_bind().dialect.name == "postgresql":
        return func.date_trunc(width, UsageEventRow.occurred_at)
    form = "%Y-%m-%d %H:00:00.000000" if width == "hour" else "%Y-%m-%d 00:00:00.000000"
    return func.strftime(form, UsageEventRow.occurred_at)
