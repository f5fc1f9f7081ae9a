"""The request log where a part of its days is moved: pages from the database and the store together."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import inspect, tuple_
from sqlalchemy.orm import Session

from billing.usage.border import border_of
from billing.usage.raw_rows import Reading, Wanted
from billing.usage.reading import read_rows
from billing.usage.tables import Charge, UsageEventRow
from core.tenants.scope import TenantScope

if TYPE_CHECKING:
    from dashboards.request_log import LogQuery

_E = UsageEventRow
_EVENT = tuple(attribute.key for attribute in inspect(UsageEventRow).column_attrs)
_CHARGE = tuple(attribute.key for attribute in inspect(Charge).column_attrs)
_COLUMNS = (*(getattr(_E, name) for name in _EVENT), Charge.amount)
_BY_TIME = (_E.occurred_at, _E.request_id)
_EVER = (datetime(1970, 1, 2, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC))
Found = tuple[tuple[UsageEventRow, int | None], Any]


@dataclass(frozen=True, slots=True)
class Part:
    """The rows after `place` (a value and a request) in the order of `value`: of all requests by time,
    else of the newest `most` up to `newest`."""

    value: Any
    place: tuple[Any, str] | None
    newest: datetime | None
    most: int
    size: int


def reaches(session: Session, log_query: "LogQuery") -> bool:
    """Whether moved days may have requests of the list."""
    border = border_of(session)
    return border is not None and log_query.span.start < border.until


def newest(session: Session, log_query: "LogQuery", lacks: list[str] | None) -> datetime | None:
    reading = Reading((_E.occurred_at,), _BY_TIME, True, log_query.conditions, 1)
    for row in read_rows(session, _wanted(log_query), reading, lacks):
        found: datetime = row[0]
        return found
    return None


def page(
    session: Session,
    log_query: "LogQuery",
    part: Part,
    lacks: list[str] | None,
    *,
    falling: bool,
) -> list[Found]:
    """The rows with their values of the sorted column."""
    conditions = log_query.conditions
    if log_query.by_time:
        if part.place is not None:
            row = tuple_(*_BY_TIME)
            conditions += (row < part.place if falling else row > part.place,)
        reading = Reading(_COLUMNS, _BY_TIME, falling, conditions, part.size)
        rows = map(_row, read_rows(session, _wanted(log_query), reading, lacks))
        return [(each, each[0].occurred_at) for each in rows]
    conditions += (_E.occurred_at <= part.newest,)
    sample = Reading((part.value, _E.request_id), _BY_TIME, True, conditions, part.most)
    ranked = sorted(_ranked(read_rows(session, _wanted(log_query), sample, lacks)), reverse=falling)
    if part.place is not None:
        place = part.place
        ranked = [each for each in ranked if (each < place if falling else each > place)]
    ranked = ranked[: part.size]
    chosen = (_E.request_id.in_([name for _, name in ranked]),)
    reading = Reading(_COLUMNS, _BY_TIME, True, chosen)
    rows = map(_row, read_rows(session, _wanted(log_query), reading, lacks))
    by_id = {each[0].request_id: each for each in rows}
    return [(by_id[name], value) for value, name in ranked if name in by_id]


def find(
    session: Session, scope: TenantScope, request_id: str
) -> tuple[UsageEventRow | None, Charge | None]:
    """A request of a moved day, and its charge. DependencyDown if the store does not answer or is not
    set."""
    if border_of(session) is None:
        return None, None
    charges = tuple(getattr(Charge, name) for name in _CHARGE)
    wanted = Wanted(*_EVER, scope.tenant_id, scope.project_id or "")
    only = (_E.request_id == request_id,)
    reading = Reading((*_COLUMNS[:-1], *charges), _BY_TIME, conditions=only, limit=1)
    for row in read_rows(session, wanted, reading):
        event = UsageEventRow(**dict(zip(_EVENT, row, strict=False)))
        values = dict(zip(_CHARGE, row[len(_EVENT) :], strict=True))
        return event, Charge(**values) if values["transaction_id"] is not None else None
    return None, None


def _ranked(rows: Any) -> Sequence[tuple[Any, str]]:
    return [(int(value) if isinstance(value, bool) else value, name) for value, name in rows]


def _row(row: tuple[Any, ...]) -> tuple[UsageEventRow, int | None]:
    """An object of no session, as the pages read it."""
    return UsageEventRow(**dict(zip(_EVENT, row, strict=False))), row[-1]


def _wanted(log_query: "LogQuery") -> Wanted:
    scope, span = log_query.scope, log_query.span
    return Wanted(span.start, span.end, scope.tenant_id, scope.project_id or "")
