"""Monthly partitions of usage events, charges and receipts on PostgreSQL: created ahead by every start
and migration and by a daily task; those of events and receipts are dropped after retention.

Request ids begin with their time, so the id is the partition key and is unique across partitions.
Ids outside every month's range, such as those of another program, go to the default partition.
"""

import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete, func, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from billing.guards import allow_maintenance, truncate_guard
from billing.usage import origin_rollups
from billing.usage.tables import EngineReceipt, UsageBatch, UsageEventRow, UsageRetention
from core.errors import Conflict
from core.ids import REQUEST, floor_id

MONTHS_AHEAD = 3
_TRIES, _LOCK_MS, _PAUSE_S = 20, 500, 0.1
_NOT_NOW = ("55P03", "40P01")  # lock_not_available, deadlock_detected
log = logging.getLogger("tollhouse.billing")
_LOCK = 7_011_992  # key of the advisory lock; any constant of its own
EVENTS, RECEIPTS = "usage_events", "engine_receipts"
TABLES = (EVENTS, "charges", RECEIPTS)


@dataclass(frozen=True, slots=True)
class Month:
    year: int
    month: int

    def of(self, table: str) -> str:
        """The name of the month's partition."""
        return f"{table}_{self.year}_{self.month:02d}"

    @property
    def starts_at(self) -> datetime:
        return datetime(self.year, self.month, 1, tzinfo=UTC)

    def next(self) -> "Month":
        if self.month == 12:
            return Month(self.year + 1, 1)
        return Month(self.year, self.month + 1)


def month_of(at: datetime) -> Month:
    return Month(at.year, at.month)


def ensure_ahead(session: Session, now: datetime) -> list[str]:
    """Create missing partitions from this month on; returns their names."""
    if session.get_bind().dialect.name != "postgresql":
        return []
    # Processes that start at the same time make each partition once.
    session.execute(text(f"select pg_advisory_xact_lock({_LOCK})"))
    months = [month_of(now)]
    for _ in range(MONTHS_AHEAD):
        months.append(months[-1].next())
    missing = [
        (table, month)
        for table in TABLES
        for there in [set(_existing(session, table))]
        for month in months
        if month.of(table) not in there
    ]
    if not missing or not _lock(session, TABLES):
        return []
    for table, month in missing:
        _make(session, table, month)
    return [month.of(table) for table, month in missing]


def _lock(session: Session, tables: tuple[str, ...]) -> bool:
    """Whether nobody else reads or writes these tables until the transaction ends. A statement that was
    planned before a partition is attached does not see the rows that move into it, and a row that is
    stored after the others have moved belongs to no partition. Who waits for the lock makes all others
    wait, so each try is short and lets go of all tables.
    """
    names = ", ".join(tables)
    for number in range(_TRIES):
        try:
            with session.begin_nested():
                session.execute(text(f"set local lock_timeout = '{_LOCK_MS}ms'"))
                session.execute(text(f"lock table {names} in access exclusive mode"))
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) not in _NOT_NOW:
                raise
            time.sleep(_PAUSE_S * (1 + number % 4))
            continue
        session.execute(text("set local lock_timeout to default"))
        return True
    log.warning(
        "no partition is made now: other transactions use %s; the next start or daily task tries again",
        names,
    )
    return False


def drop_before(session: Session, keep_from: datetime, now: datetime) -> int:
    """Retention: drop whole months before `keep_from`; returns the number of dropped events.
    Conflict if any of them is not rated. Receipts go with them; charges, roll-ups, ledger and
    invoices stay. SQLite keeps everything.
    """
    if session.get_bind().dialect.name != "postgresql":
        return 0
    last = month_of(keep_from)
    unrated = session.scalar(
        select(func.count())
        .select_from(UsageEventRow)
        .join(UsageBatch, UsageBatch.id == UsageEventRow.batch_id)
        .where(UsageBatch.rated_at.is_(None), UsageEventRow.request_id < _floor(last))
    )
    if unrated:
        raise Conflict(
            f"{unrated} events before {last.year}-{last.month:02d} are not rated.",
            next_step="Run the rating task first; unbilled usage is never dropped.",
        )
    gone = 0
    for name in _before(session, EVENTS, last):
        gone += int(session.execute(text(f"select count(*) from {name}")).scalar_one())
        session.execute(text(f"drop table {name}"))
    gone += _drop_undivided(session, last)
    if gone:
        for name in _before(session, RECEIPTS, last):
            session.execute(text(f"drop table {name}"))
        row = UsageRetention(
            floor_id=_floor(last), kept_from=last.starts_at, events=gone, dropped_at=now
        )
        session.add(row)
        origin_rollups.drop_names_before(session, last.starts_at)
        allow_maintenance(session)
        session.execute(delete(EngineReceipt).where(EngineReceipt.request_id < _floor(last)))
        _recount_batches(session)
    return gone


def _drop_undivided(session: Session, month: Month) -> int:
    """Rows of the default partition: of months before the first partition. An id without a time says
    nothing about its month, and would be billed again if it came again: such a row stays, without the
    name of its end user."""
    allow_maintenance(session)
    dated = {"first": f"{REQUEST}_", "floor": _floor(month)}
    gone = session.execute(
        text(f"delete from {EVENTS}_default where request_id >= :first and request_id < :floor"),
        dated,
    ).rowcount  # type: ignore[attr-defined]
    session.execute(
        text(
            f"update {EVENTS}_default set end_user = null where end_user is not null"
            " and occurred_at < :kept_from and not (request_id >= :first and request_id < :last)"
        ),
        {"kept_from": month.starts_at, "first": dated["first"], "last": f"{REQUEST}`"},
    )
    return int(gone)


def _make(session: Session, table: str, month: Month) -> None:
    """Create the partition and move the month's rows into it from the default partition."""
    start, end, name = _floor(month), _floor(month.next()), month.of(table)
    allow_maintenance(session)
    session.execute(text(f"create table {name} (like {table} including all)"))
    session.execute(
        text(
            f"with moved as (delete from {table}_default"
            " where request_id >= :start and request_id < :end returning *)"
            f" insert into {name} select * from moved"
        ),
        {"start": start, "end": end},
    )
    session.execute(
        text(
            f"alter table {table} attach partition {name} for values from ('{start}') to ('{end}')"
        )
    )
    session.execute(text(truncate_guard(name)))


def _existing(session: Session, table: str) -> list[str]:
    rows = session.scalars(
        text(
            "select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid"
            f" where i.inhparent = '{table}'::regclass and c.relname <> '{table}_default'"
        )
    )
    return sorted(rows)


def _before(session: Session, table: str, month: Month) -> list[str]:
    return [name for name in _existing(session, table) if name < month.of(table)]


def _recount_batches(session: Session) -> None:
    """Update the event count of each batch, which the audit compares with the stored events."""
    session.execute(
        text(
            "update usage_batches set events = coalesce((select count(*) from usage_events e"
            " where e.batch_id = usage_batches.id), 0) where rated_at is not null"
        )
    )


def _floor(month: Month) -> str:
    return floor_id(REQUEST, month.starts_at)


def retention_start(now: datetime, months: int) -> datetime:
    """The first kept moment when the last `months` whole months are kept."""
    at = month_of(now).starts_at
    for _ in range(months):
        at = month_of(at - timedelta(days=1)).starts_at
    return at
