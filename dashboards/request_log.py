"""The request log with keyset pagination: each page starts at the last row of the previous one, so
that any page of ten million requests costs the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, Select, select, tuple_
from sqlalchemy.orm import Session

from billing.models import Charge, UsageEventRow
from core.database import Database
from core.errors import BadRequest
from core.tenants.scope import TenantScope
from dashboards.filters import Range

LogRow = tuple[UsageEventRow, int | None]  # the event, and its charge in picounits once rated
_EXPORTED = 2_000  # rows in memory at a time


@dataclass(frozen=True, slots=True)
class LogQuery:
    scope: TenantScope
    span: Range
    conditions: tuple[ColumnElement[bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Cursor:
    """A cursor: the rows older or newer than the given row."""

    at: datetime
    request_id: str
    older: bool

    def __str__(self) -> str:
        return f"{self.at.isoformat()}~{self.request_id}"


@dataclass(frozen=True, slots=True)
class LogPage:
    rows: list[LogRow]  # newest first
    newer: str = ""  # cursor of the page; empty if there is none
    older: str = ""


def cursor_of(query: Mapping[str, str]) -> Cursor | None:
    """The cursor in `before` or `after` of the URL. BadRequest if it is malformed."""
    name = "before" if query.get("before") else "after"
    text = query.get(name) or ""
    if not text:
        return None
    moment, _, request_id = text.partition("~")
    try:
        at = datetime.fromisoformat(moment)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None or not request_id:
        raise BadRequest(
            f"{name} is {text[:60]!r}, which is not a cursor of this list.",
            next_step="Remove it to start with the newest request.",
            param=name,
        )
    return Cursor(at, request_id[:40], name == "before")


def page_of(session: Session, log_query: LogQuery, cursor: Cursor | None, size: int) -> LogPage:
    wants_newer = cursor is not None and not cursor.older
    query = _query(log_query, cursor).limit(size + 1)
    found: list[LogRow] = [(row[0], row[1]) for row in session.execute(query)]
    more, rows = len(found) > size, found[:size]
    if wants_newer:
        rows.reverse()
    if not rows:
        return LogPage([])
    has_newer = more if wants_newer else cursor is not None
    has_older = True if wants_newer else more
    return LogPage(
        rows,
        _cursor_at(rows[0], older=False) if has_newer else "",
        _cursor_at(rows[-1], older=True) if has_older else "",
    )


def all_rows(database: Database, log_query: LogQuery) -> Iterator[LogRow]:
    """All matching requests, newest first, with `_EXPORTED` rows in memory at a time."""
    cursor: Cursor | None = None
    while True:
        with database.read() as session:
            query = _query(log_query, cursor).limit(_EXPORTED)
            found: list[LogRow] = [(row[0], row[1]) for row in session.execute(query)]
            session.expunge_all()
        yield from found
        if len(found) < _EXPORTED:
            return
        last = found[-1][0]
        cursor = Cursor(last.occurred_at, last.request_id, older=True)


def _cursor_at(row: LogRow, *, older: bool) -> str:
    return str(Cursor(row[0].occurred_at, row[0].request_id, older))


def _query(log_query: LogQuery, cursor: Cursor | None) -> Select[UsageEventRow, int]:
    event = UsageEventRow
    scope, span = log_query.scope, log_query.span
    query = (
        select(event, Charge.amount)
        .join(Charge, Charge.request_id == event.request_id, isouter=True)
        .where(
            event.tenant_id == scope.tenant_id,
            event.occurred_at >= span.start,
            event.occurred_at < span.end,
        )
    )
    if scope.project_id:
        query = query.where(event.project_id == scope.project_id)
    query = query.where(*log_query.conditions)
    row = tuple_(event.occurred_at, event.request_id)
    if cursor is None:
        return query.order_by(event.occurred_at.desc(), event.request_id.desc())
    # The time alone bounds the index scan; the pair orders rows with the same time.
    if cursor.older:
        return query.where(
            event.occurred_at <= cursor.at, row < (cursor.at, cursor.request_id)
        ).order_by(event.occurred_at.desc(), event.request_id.desc())
    return query.where(
        event.occurred_at >= cursor.at, row > (cursor.at, cursor.request_id)
    ).order_by(event.occurred_at, event.request_id)
