"""The port of raw rows on the database itself, PostgreSQL or SQLite."""

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session
from sqlalchemy.sql import coercions, roles, visitors

from billing.usage.raw_rows import Reading, Wanted
from billing.usage.tables import Charge, UsageEventRow

_FETCHED = 5_000


class SqlRows:
    def __init__(self, session: Session, conditions: Sequence[ColumnElement[bool]] = ()) -> None:
        """`conditions` leave out what another store has."""
        self._session = session
        self._conditions = conditions

    def rows(self, wanted: Wanted, reading: Reading) -> Iterator[tuple[Any, ...]]:
        event = UsageEventRow
        query = select(*(_labelled(reading.columns))).select_from(event)
        if any(reads_charges(each) for each in (*reading.columns, *reading.conditions)):
            query = query.join(Charge, Charge.request_id == event.request_id, isouter=True)
        query = query.where(event.occurred_at >= wanted.start, event.occurred_at < wanted.end)
        for column, value in (
            (event.tenant_id, wanted.tenant_id),
            (event.project_id, wanted.project_id),
        ):
            if value:
                query = query.where(column == value)
        query = query.where(*self._conditions, *reading.conditions)
        query = query.order_by(
            *(each.desc() if reading.falling else each for each in reading.order)
        )
        if reading.limit is not None:
            query = query.limit(reading.limit)
        else:
            query = query.execution_options(yield_per=_FETCHED)
        for row in self._session.execute(query):
            yield tuple(row)


def _labelled(columns: Sequence[Any]) -> list[Any]:
    """A column may be asked for twice."""
    return [each.label(f"c{number}") for number, each in enumerate(columns)]


def reads_charges(element: Any) -> bool:
    parts = visitors.iterate(coercions.expect(roles.ColumnsClauseRole, element))
    return any(getattr(part, "table", None) is Charge.__table__ for part in parts)
