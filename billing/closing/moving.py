"""Moves closed days of raw events and charges to their store, and drops them from the database later.

A day's rows no longer change: it is rated, closed, and its sums are frozen. They are copied without a
lock, and the border passes the day in the transaction that has found the rows here, the rows there, the
hourly sums there and the frozen sums equal. A failure at any point leaves the day in the database, and
the next run copies it again. The drop compares the store with the frozen sums once more.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from billing.archive.columns import CHARGE_COLUMNS, EVENT_COLUMNS
from billing.archive.comparing import store_differences
from billing.closing import closing
from billing.guards import allow_maintenance
from billing.usage import retention
from billing.usage.border import take_lock
from billing.usage.raw_rows import RawArchive
from billing.usage.tables import Charge, ClosedDay, MovedDay, UsageBatch, UsageEventRow
from core.database import Database
from core.errors import Conflict
from core.ids import REQUEST, floor_id

log = logging.getLogger("tollhouse.billing")
DAY = timedelta(days=1)
# Longer than any statement or transaction that began with the border before the day.
DROPPED_AFTER = timedelta(hours=1)
_ROWS = 50_000  # about as many at once
_E, _C, _B = UsageEventRow, Charge, UsageBatch


@dataclass(frozen=True, slots=True)
class _Day:
    day: datetime
    after: int  # batches after this one
    last: int  # up to this one


def move_days(
    database: Database, archive: RawArchive, now: datetime, keep_days: int
) -> list[datetime]:
    """Move the closed days before the last `keep_days` whole days, oldest first; returns those that
    were moved. Conflict if the sums differ, DependencyDown if the store does not answer."""
    moved: list[datetime] = []
    with alone(database) as mine:
        keep_from = _start(now) - keep_days * DAY
        while mine and (day := _claim(database, archive, keep_from)) is not None:
            _copy(database, archive, day)
            with database.transaction() as session:
                _compare(session, archive, day, rows_too=True)
                session.get_one(MovedDay, day.day).moved_at = now
            moved.append(day.day)
    return moved


def drop_moved(database: Database, archive: RawArchive, now: datetime) -> int:
    """Drop the rows of moved days from the database; returns the number of events."""
    gone = 0
    with alone(database) as mine:
        for day in _droppable(database, now) if mine else ():
            with database.transaction() as session:
                _compare(session, archive, day, rows_too=False)
            for first, last in _parts(database, day):
                with database.transaction() as session:
                    gone += _delete(session, first, last)
            with database.transaction() as session:
                session.get_one(MovedDay, day.day).dropped_at = now
    return gone


@contextmanager
def alone(database: Database) -> Iterator[bool]:
    """Whether no other process moves days or erases names meanwhile."""
    with database.transaction() as session:
        yield take_lock(session)


def _claim(database: Database, archive: RawArchive, keep_from: datetime) -> _Day | None:
    """The next day to move, noted as begun, so that its store is known to be this database's."""
    store = archive.identity()
    with database.transaction() as session:
        known = session.scalars(select(MovedDay).order_by(MovedDay.day)).all()
        if known and known[0].store != store:
            raise Conflict(
                "Earlier days were moved to another ClickHouse database.",
                next_step="Name that one in TOLLHOUSE_EVENTS_URL.",
            )
        day = _next(session, known[-1] if known else None, keep_from)
        if day is None or _is_unsummed(session, day):
            return None
        if not known and archive.days():
            raise Conflict(
                "The ClickHouse database holds usage of another deployment.",
                next_step="Name an empty database in TOLLHOUSE_EVENTS_URL.",
            )
        if session.get(MovedDay, day.day) is None:
            session.add(
                MovedDay(
                    day=day.day,
                    after_batch=day.after,
                    last_batch=day.last,
                    store=store,
                    # A gateway's clock may be ahead by some minutes.
                    floor_id=floor_id(REQUEST, day.day + DAY + timedelta(hours=1)),
                )
            )
        return day


def _next(session: Session, last: MovedDay | None, keep_from: datetime) -> _Day | None:
    if last is not None and last.moved_at is None:
        return _Day(last.day, last.after_batch, last.last_batch)
    query = select(ClosedDay).order_by(ClosedDay.day)
    if last is not None:
        found = session.scalar(query.where(ClosedDay.day > last.day).limit(1))
        after = last.last_batch
    else:
        found, after = _first(session, list(session.scalars(query)))
    if found is None or found.day + DAY > keep_from:
        return None
    return _Day(found.day, after, found.last_batch)


def _is_unsummed(session: Session, day: _Day) -> bool:
    """Whether the service roll-ups still have to read its rows."""
    waiting = select(_B.id).where(_B.id > day.after, _B.id <= day.last, _B.summed_at.is_(None))
    return session.scalar(waiting.limit(1)) is not None


def _first(session: Session, days: list[ClosedDay]) -> tuple[ClosedDay | None, int]:
    """The first day of which retention has dropped nothing, and the last batch before it."""
    dropped = retention.latest_retention(session)
    after = 0
    for day in days:
        whole = dropped is None or (
            day.day >= dropped.kept_from + DAY
            and closing.row_sums(session, after, day.last_batch) == _whole(day.sums)
        )
        if whole:
            return day, after
        after = day.last_batch
    return None, 0


def _copy(database: Database, archive: RawArchive, day: _Day) -> None:
    archive.clear(day.day)
    events = [getattr(_E, name) for name in EVENT_COLUMNS]
    charges = [getattr(_C, name) for name in CHARGE_COLUMNS]
    query: Any = select(*events, *charges).outerjoin(_C, _C.request_id == _E.request_id)
    for first, last in _parts(database, day):
        with database.read() as session:
            rows = session.execute(query.where(_E.batch_id >= first, _E.batch_id <= last)).all()
        archive.store(day.day, [tuple(row) for row in rows])
    archive.sum_hours(day.day)


def _compare(session: Session, archive: RawArchive, day: _Day, *, rows_too: bool) -> None:
    """Conflict unless the store and, with `rows_too`, the rows here sum to what the day was closed
    with."""
    closed = session.get_one(ClosedDay, day.day)
    found = store_differences(session, archive, closed)
    ours = closing.row_sums(session, day.after, day.last) if rows_too else _whole(closed.sums)
    if ours != _whole(closed.sums):
        found.append(f"the database has {ours}")
    if found:
        raise Conflict(
            f"The store does not hold {day.day:%Y-%m-%d} as it was closed: {'; '.join(found)}.",
            next_step="Nothing was dropped. Check the ClickHouse server and `tollhouse audit`; the "
            "next run tries again.",
        )


def _droppable(database: Database, now: datetime) -> list[_Day]:
    with database.read() as session:
        rows = session.scalars(
            select(MovedDay)
            .where(MovedDay.dropped_at.is_(None), MovedDay.moved_at <= now - DROPPED_AFTER)
            .order_by(MovedDay.day)
        )
        return [_Day(row.day, row.after_batch, row.last_batch) for row in rows]


def _parts(database: Database, day: _Day) -> list[tuple[int, int]]:
    """Ranges of batches with about `_ROWS` events each."""
    with database.read() as session:
        batches = session.execute(
            select(_B.id, _B.events).where(_B.id > day.after, _B.id <= day.last).order_by(_B.id)
        ).all()
    found: list[tuple[int, int]] = []
    first, events = None, 0
    for number, count in batches:
        first, events = first if first is not None else number, events + count
        if events >= _ROWS:
            found.append((first, number))
            first, events = None, 0
    if first is not None:
        found.append((first, batches[-1][0]))
    return found


# A receipt of one of several prompts has the request's id, a dot and a number; "/" follows the dot.
_DELETES = (
    "delete from charges c using usage_events e"
    " where c.request_id = e.request_id and e.batch_id between :first and :last",
    "delete from engine_receipts r using usage_events e"
    " where r.request_id >= e.request_id and r.request_id < e.request_id || '/'"
    " and e.batch_id between :first and :last",
    "delete from usage_events where batch_id between :first and :last",
)


def _delete(session: Session, first: int, last: int) -> int:
    """Returns the number of events."""
    allow_maintenance(session)
    found: Any = None
    for statement in _DELETES:
        found = session.execute(text(statement), {"first": first, "last": last})
    return int(found.rowcount)


def _whole(sums: dict[str, Any]) -> dict[str, int]:
    return {name: int(value) for name, value in sums.items()}


def _start(at: datetime) -> datetime:
    return at.replace(hour=0, minute=0, second=0, microsecond=0)


@dataclass(frozen=True, slots=True)
class Unmoved:
    """Closed days that should have been moved."""

    days: int = 0
    oldest: datetime | None = None
    age_s: float = 0.0  # since the oldest of them could have been moved


def unmoved(session: Session, now: datetime, keep_days: int) -> Unmoved:
    last = session.scalar(select(func.max(MovedDay.day)).where(MovedDay.moved_at.is_not(None)))
    waiting = [ClosedDay.day < _start(now) - keep_days * DAY]
    dropped = retention.latest_retention(session)
    if last is not None:
        waiting.append(ClosedDay.day > last)
    elif dropped is not None:  # what retention has dropped cannot be moved
        waiting.append(ClosedDay.day >= dropped.kept_from + DAY)
    oldest = session.scalar(select(ClosedDay).where(*waiting).order_by(ClosedDay.day).limit(1))
    if oldest is None:
        return Unmoved()
    days = session.scalar(select(func.count()).select_from(ClosedDay).where(*waiting))
    since = max(oldest.day + (keep_days + 1) * DAY, oldest.closed_at)
    return Unmoved(int(days or 0), oldest.day, max(0.0, (now - since).total_seconds()))
