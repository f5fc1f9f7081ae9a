"""The request log with keyset pagination: each page starts at the last row of the previous one, so
that any page of ten million requests costs the same.

By time, the whole log is in order. By another column, the newest `SORTED` requests that match are: a
cursor then also says which is the newest of them, so that pages agree while requests arrive.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, case, func, select, tuple_
from sqlalchemy.orm import Session
from sqlalchemy.sql import coercions, roles, visitors

from billing.usage.day_range import Range
from billing.usage.tables import Charge, UsageBatch, UsageEventRow
from core.clock import usual
from core.database import Database
from core.errors import BadRequest
from core.events import WARM_UP
from core.tenants.scope import TenantScope
from dashboards import moved_requests

LogRow = tuple[UsageEventRow, int | None]  # the event, and its charge in picounits once rated
SORTED = 10_000
_EXPORTED = 2_000  # rows in memory at a time
_TIME = "at"
# What is not there sorts as less than any value.
_VALUES: dict[str, Any] = {
    _TIME: UsageEventRow.occurred_at,
    "request": UsageEventRow.request_id,
    "name": UsageEventRow.model + ":" + func.coalesce(UsageEventRow.adapter, ""),
    "status": UsageEventRow.status,
    "end": UsageEventRow.finish_reason,
    "input_tokens": UsageEventRow.input_tokens,
    "cached_tokens": UsageEventRow.cached_tokens,
    "output_tokens": UsageEventRow.output_tokens,
    "first_ms": func.coalesce(UsageEventRow.first_token_ms, -1),
    "duration_ms": UsageEventRow.duration_ms,
    "amount": func.coalesce(Charge.amount, 0),
}
_WORDS = ("request", "name", "end")
SORTS = tuple(_VALUES)


@dataclass(frozen=True, slots=True)
class LogQuery:
    scope: TenantScope
    span: Range
    conditions: tuple[ColumnElement[bool], ...] = ()
    sort: str = _TIME  # of SORTS
    falling: bool = True

    @property
    def by_time(self) -> bool:
        return self.sort == _TIME

    @property
    def order(self) -> str:
        return f"-{self.sort}" if self.falling else self.sort


@dataclass(frozen=True, slots=True)
class Cursor:
    """The rows after the given one in the order of the list, or before it."""

    value: Any  # of the sorted column
    request_id: str
    after: bool
    newest: datetime | None = None  # of the sorted requests, where they are not sorted by time

    def __str__(self) -> str:
        value = self.value.isoformat() if isinstance(self.value, datetime) else str(self.value)
        newest = f"~{self.newest.isoformat()}" if self.newest is not None else ""
        return f"{value}~{self.request_id}{newest}"


@dataclass(frozen=True, slots=True)
class LogPage:
    rows: list[LogRow]
    earlier: str = ""  # cursor of the page before this one; empty if there is none
    later: str = ""


def cursor_of(query: Mapping[str, str], sort: str = _TIME) -> Cursor | None:
    """The cursor in `before` (the page after a row) or `after` (the page before it) of the URL.
    BadRequest if it is malformed."""
    name = "before" if query.get("before") else "after"
    text = query.get(name) or ""
    if not text:
        return None
    try:
        return _cursor(text, sort, after=name == "before")
    except ValueError:
        raise BadRequest(
            f"{name} is {text[:60]!r}, which is not a cursor of this list.",
            next_step="Remove it to start with the first page.",
            param=name,
        ) from None


def _cursor(text: str, sort: str, *, after: bool) -> Cursor:
    newest = None
    if sort != _TIME:
        text, _, instant = text.rpartition("~")
        newest = _instant(instant)
    value, _, request_id = text.rpartition("~")
    if not value or not request_id:
        raise ValueError
    read = _instant if sort == _TIME else str if sort in _WORDS else int
    return Cursor(read(value), request_id[:40], after, newest)


def _instant(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError
    return usual(found)


def page_of(
    session: Session,
    log_query: LogQuery,
    cursor: Cursor | None,
    size: int,
    lacks: list[str] | None = None,
) -> LogPage:
    """With `lacks`, a store of moved days that does not answer gives no rows, and its reason goes there;
    without it that is an error."""
    backwards = cursor is not None and not cursor.after
    newest = cursor.newest if cursor is not None else None
    if not log_query.by_time and newest is None:
        newest = _newest(session, log_query, lacks)
        if newest is None:
            return LogPage([])
    found = _read(session, log_query, (cursor, newest, size + 1), lacks)
    more, rows = len(found) > size, found[:size]
    if backwards:
        rows.reverse()
    if not rows:
        return LogPage([])
    has_earlier = more if backwards else cursor is not None
    has_later = True if backwards else more
    return LogPage(
        [row for row, _ in rows],
        _cursor_at(rows[0], newest, after=False) if has_earlier else "",
        _cursor_at(rows[-1], newest, after=True) if has_later else "",
    )


def counts(session: Session, log_query: LogQuery) -> tuple[int, int, int]:
    """All matching requests, those with a status of 400 to 499, and of 500 or above. BadRequest where
    days of them were moved to another store."""
    if moved_requests.reaches(session, log_query):
        raise BadRequest(
            "Some of these days were moved to ClickHouse, where single requests are not compared.",
            next_step="Filter by model, adapter, key, project and member only.",
            param="q",
        )
    status = UsageEventRow.status
    refused = func.sum(case((status.between(400, 499), 1), else_=0))
    failed = func.sum(case((status >= 500, 1), else_=0))
    row = session.execute(_matching(log_query, [func.count(), refused, failed])).one()
    return int(row[0]), int(row[1] or 0), int(row[2] or 0)


def last_batch(session: Session) -> int:
    """The number of the newest batch of events."""
    return session.scalar(select(func.max(UsageBatch.id))) or 0


def arrived(session: Session, log_query: LogQuery, batch: int) -> list[LogRow]:
    """The newest requests that were stored after the batch, in the order in which they arrived; also
    those of the batches just before it, which may have been committed later."""
    event = UsageEventRow
    query = _matching(log_query, [event, Charge.amount]).where(event.batch_id > batch - _LATE)
    newest = query.order_by(event.batch_id.desc(), event.request_id.desc()).limit(_ARRIVED)
    return [(row[0], row[1]) for row in session.execute(newest)][::-1]


_LATE = 20  # batches
_ARRIVED = 200  # rows


def all_rows(database: Database, log_query: LogQuery) -> Iterator[LogRow]:
    """All matching requests in order, with `_EXPORTED` rows in memory at a time; of those that are
    sorted by another column than time, the newest `SORTED`."""
    cursor: Cursor | None = None
    while True:
        with database.read() as session:
            found = page_of(session, log_query, cursor, _EXPORTED)
            session.expunge_all()
        yield from found.rows
        if not found.later:
            return
        cursor = cursor_of({"before": found.later}, log_query.sort)


_Found = tuple[LogRow, Any]  # with the value of the sorted column


def _cursor_at(found: _Found, newest: datetime | None, *, after: bool) -> str:
    (event, _), value = found
    return str(Cursor(value, event.request_id, after, newest))


def _newest(session: Session, log_query: LogQuery, lacks: list[str] | None) -> datetime | None:
    event = UsageEventRow
    if moved_requests.reaches(session, log_query):
        return moved_requests.newest(session, log_query, lacks)
    query = _matching(log_query, [event.occurred_at]).order_by(event.occurred_at.desc())
    found: datetime | None = session.scalar(query.limit(1))
    return found


def _read(
    session: Session,
    log_query: LogQuery,
    part: tuple[Cursor | None, datetime | None, int],
    lacks: list[str] | None,
) -> list[_Found]:
    cursor, newest, size = part
    falling = log_query.falling == (cursor is None or cursor.after)
    if moved_requests.reaches(session, log_query):
        value = _VALUES[log_query.sort]
        place = (cursor.value, cursor.request_id) if cursor is not None else None
        wanted = moved_requests.Part(value, place, newest, SORTED, size)
        return moved_requests.page(session, log_query, wanted, lacks, falling=falling)
    if log_query.by_time:
        query = _by_time(log_query, cursor, falling=falling).limit(size)
        return [((row[0], row[1]), row[0].occurred_at) for row in session.execute(query)]
    assert newest is not None
    sample = _sample(log_query, newest)
    value, request_id = sample.c.value, sample.c.request_id
    ids = select(request_id, value)
    if cursor is not None:
        row, place = tuple_(value, request_id), (cursor.value, cursor.request_id)
        ids = ids.where(row < place if falling else row > place)
    order = [value.desc(), request_id.desc()] if falling else [value, request_id]
    ranked = [(row[0], row[1]) for row in session.execute(ids.order_by(*order).limit(size))]
    rows = _with_charges([name for name, _ in ranked])
    found = {row[0].request_id: (row[0], row[1]) for row in session.execute(rows)}
    return [(found[name], int(v) if log_query.sort not in _WORDS else v) for name, v in ranked]


def _with_charges(ids: Sequence[str]) -> Select[UsageEventRow, int]:
    event = UsageEventRow
    joined = select(event, Charge.amount).join(
        Charge, Charge.request_id == event.request_id, isouter=True
    )
    return joined.where(event.request_id.in_(ids))


def _sample(log_query: LogQuery, newest: datetime) -> Any:
    event = UsageEventRow
    value = _VALUES[log_query.sort].label("value")
    query = _matching(log_query, [event.request_id, value]).where(event.occurred_at <= newest)
    latest = query.order_by(event.occurred_at.desc(), event.request_id.desc())
    return latest.limit(SORTED).subquery()


def _matching(log_query: LogQuery, columns: Sequence[Any]) -> Select[Any]:
    event = UsageEventRow
    scope, span = log_query.scope, log_query.span
    query = select(*columns).select_from(event)
    if any(_reads_charges(each) for each in (*columns, *log_query.conditions)):
        query = query.join(Charge, Charge.request_id == event.request_id, isouter=True)
    query = query.where(
        event.tenant_id == scope.tenant_id,
        event.finish_reason != WARM_UP,
        event.occurred_at >= span.start,
        event.occurred_at < span.end,
        *log_query.conditions,
    )
    return query.where(event.project_id == scope.project_id) if scope.project_id else query


def _reads_charges(element: Any) -> bool:
    parts = visitors.iterate(coercions.expect(roles.ColumnsClauseRole, element))
    return any(getattr(part, "table", None) is Charge.__table__ for part in parts)


def _by_time(
    log_query: LogQuery, cursor: Cursor | None, *, falling: bool
) -> Select[UsageEventRow, int]:
    event = UsageEventRow
    query = _matching(log_query, [event, Charge.amount])
    at, request_id = event.occurred_at, event.request_id
    if cursor is not None:
        # The time alone bounds the index scan; the pair orders rows with the same time.
        row, place = tuple_(at, request_id), (cursor.value, cursor.request_id)
        query = query.where(at <= cursor.value if falling else at >= cursor.value)
        query = query.where(row < place if falling else row > place)
    order = [at.desc(), request_id.desc()] if falling else [at, request_id]
    return query.order_by(*order)
