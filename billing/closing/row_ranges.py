"""Divides the rows that an audit reads into ranges of request ids, and reads several of them at once.

A range is small enough that PostgreSQL joins its events, charges and receipts in memory or in the order
of their keys; a join of all rows of a large day goes through the disk. Within one statement the database
would pass joined rows to one process that sums them, because it cannot know how few groups there are.
So connections of our own share the work, all on one exported snapshot:
https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-SNAPSHOT-SYNCHRONIZATION
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from billing.differences import EVERYTHING, Since
from billing.usage import retention
from billing.usage.tables import UsageEventRow

T = TypeVar("T")
E = UsageEventRow
ROWS = 400_000  # events of a range, about
_SAMPLED = 5_000  # events by which the ranges are chosen
_IDS_AT_ONCE = 5_000
_SETTINGS = {
    "work_mem": "128MB",  # a hash join or a group by of a range
    "jit": "off",
    "statement_timeout": "3600s",
    # The planner expects many times the groups that there are, and would sort all rows.
    "enable_sort": "off",
}
_COUNTED = text(
    "select coalesce(sum(greatest(c.reltuples, 0)), 0) from pg_class c"
    " join pg_inherits i on i.inhrelid = c.oid where i.inhparent = 'usage_events'::regclass"
)
_SAMPLE = text(
    "select request_id from usage_events tablesample system (:percent) repeatable (1)"
    " where request_id >= :first order by request_id"
)
_TOGETHER = text("select current_setting('max_parallel_workers_per_gather')::int")


@dataclass(frozen=True, slots=True)
class Part:
    """Request ids from `first` up to before `end`, or only `ids`: those of late usage."""

    first: str = ""
    end: str = ""
    ids: tuple[str, ...] = ()

    def of(self, column: Any) -> list[Any]:
        """Conditions on a column of request ids."""
        if self.ids:
            return [column.in_(self.ids)]
        found = [column >= self.first] if self.first else []
        return [*found, column < self.end] if self.end else found


def prepare(session: Session) -> None:
    """Memory and time for statements that read whole tables, until the transaction ends."""
    if session.get_bind().dialect.name != "postgresql":
        return
    from core.postgres_connection import allow_long_statements  # psycopg is for PostgreSQL alone

    allow_long_statements(session.connection())
    for name, value in _SETTINGS.items():
        session.execute(text(f"set local {name} = '{value}'"))


def parts_of(session: Session, since: Since) -> list[Part]:
    """Every request id from `since.id` on, and the earlier ones of open usage."""
    dropped = retention.latest_retention(session)
    floor = dropped.floor_id if dropped else ""
    bounds = sorted({since.id, *([floor] if floor > since.id else []), *_bounds(session, since)})
    ends = [*bounds[1:], ""]
    found = [Part(first, end) for first, end in zip(bounds, ends, strict=True)]
    return found if since == EVERYTHING else [*found, *_late(session, since)]


def _bounds(session: Session, since: Since) -> list[str]:
    if session.get_bind().dialect.name != "postgresql":
        return []
    there = float(session.scalar(_COUNTED) or 0)
    if there <= ROWS:
        return []
    share = min(1.0, _SAMPLED / there)
    given = {"percent": 100 * share, "first": since.id}
    sample = list(session.scalars(_SAMPLE, given))
    count = int(len(sample) / share / ROWS) + 1
    return [sample[len(sample) * number // count] for number in range(1, count) if sample]


def _late(session: Session, since: Since) -> Iterator[Part]:
    query = select(E.request_id).where(E.batch_id > since.batch, E.request_id < since.id)
    ids = session.scalars(query.order_by(E.request_id)).all()
    for first in range(0, len(ids), _IDS_AT_ONCE):
        yield Part(ids=tuple(ids[first : first + _IDS_AT_ONCE]))


def read_parts(session: Session, parts: list[Part], read: Callable[[Session, Part], T]) -> list[T]:
    """What `read` finds of each part. All parts are read from one state of the database, that of the
    session's snapshot, on as many connections as one statement may have parallel workers."""
    bind = session.get_bind()
    together = 1
    if bind.dialect.name == "postgresql" and isinstance(bind, Engine):
        together = min(len(parts), int(session.scalar(_TOGETHER) or 1))
    if together <= 1 or not isinstance(bind, Engine):
        return [read(session, part) for part in parts]
    name = str(session.scalar(text("select pg_export_snapshot()")))
    opened = _Snapshots(bind, name, session.info)
    try:
        with ThreadPoolExecutor(together) as pool:
            return list(pool.map(lambda part: read(opened.session(), part), parts))
    finally:
        opened.close()


class _Snapshots:
    """A session for each thread, all on one snapshot."""

    def __init__(self, engine: Engine, name: str, info: dict[Any, Any]) -> None:
        self._engine, self._name, self._info = engine, name, info
        self._own = threading.local()
        self._all: list[Session] = []

    def session(self) -> Session:
        found: Session | None = getattr(self._own, "session", None)
        if found is not None:
            return found
        made = self._own.session = Session(self._engine, info=self._info)
        self._all.append(made)
        options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        made.connection(execution_options=options)
        made.execute(text(f"set transaction snapshot '{self._name}'"))
        prepare(made)
        made.execute(text("set local max_parallel_workers_per_gather = 0"))
        return made

    def close(self) -> None:
        for each in self._all:
            each.close()
