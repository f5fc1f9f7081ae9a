"""Checks of the data directory, the database and its schema, the spools, and parked records."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from sqlalchemy import func, select, text

from billing.archive.opening import make_archive
from billing.closing import moving
from billing.exports.schedules import PARKED
from billing.exports.tables import ExportJob, ExportSchedule
from billing.recovery import guard, marks, places
from billing.restores import restores
from billing.usage.border import border_of, readable
from billing.usage.tables import ParkedEvent, UsageBatch
from core import heartbeats
from core.clock import Clock
from core.database import Database, Limits
from core.dead_letter_models import DeadLetter
from core.errors import DependencyDown
from core.sealing import Sealer
from core.settings import Settings
from core.tenants.operator import known_operator_token
from gateway.admin.stored_data.journal import Journal
from gateway.cli.doctor.check import Finding, bad, good, unused, warn
from gateway.metering.spool_watch import spool_counts
from migrations.run import current, head

LEAST_FREE = 2**30
MOST_SKEW_S = 5
MOST_SPOOL_AGE_S = 300
MOST_UNRATED_S = 300.0
MOST_LATE_S = 60.0
MOST_UNMOVED_S = 21_600.0  # as the alert DaysNotMoved has it
_REPLICATION = text(
    "select pg_is_in_recovery(), case when pg_last_wal_receive_lsn() = pg_last_wal_replay_lsn()"
    " then 0 else extract(epoch from now() - pg_last_xact_replay_timestamp()) end"
)


def data_directory(settings: Settings, _clock: Clock) -> Finding:
    path = settings.data_dir
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".doctor"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        return bad(
            f"{path} cannot be written: {error.strerror}.",
            "Set TOLLHOUSE_DATA_DIR to a writable directory.",
        )
    free = shutil.disk_usage(path).free
    summary = f"{path.resolve()}, {free / 2**30:.1f} GiB free"
    if free < LEAST_FREE:
        return warn(
            summary, "Free disk space: the gateway stops serving when it cannot record usage."
        )
    return good(summary)


def database(settings: Settings, _clock: Clock) -> Finding:
    with _open_database(settings) as db:
        db.ping()
        at, expected = current(db), head()
    if at is None:
        return warn(
            f"{db.dialect} answers and is empty",
            "Run `tollhouse serve` or `tollhouse migrate` to create the schema.",
        )
    if at != expected:
        return bad(
            f"{db.dialect} has schema {at}, the code needs {expected}", "Run `tollhouse migrate`."
        )
    return good(f"{db.dialect}, schema {at}")


def replica(settings: Settings, _clock: Clock) -> Finding:
    """Report a read replica that does not answer, is late, or is no standby."""
    if not settings.read_database_url:
        return unused("pages and exports read the database itself")
    copy = Database(settings.read_database_url, pool_size=1, limits=Limits(connect_s=2))
    try:
        copy.ping()
        at, expected = current(copy), head()
        with copy.read() as session:
            is_standby, late = session.execute(_REPLICATION).one()
    except DependencyDown as error:
        step = "Check TOLLHOUSE_READ_DATABASE_URL; meanwhile the database itself is read."
        return bad(f"the read replica: {error.message}", step)
    finally:
        copy.close()
    if at != expected:
        return bad(f"the replica has schema {at}, the code needs {expected}", "Check replication.")
    if not is_standby:
        return warn(
            "TOLLHOUSE_READ_DATABASE_URL is not a standby, so its lag is unknown",
            "Name a streaming replica, or monitor the replication separately.",
        )
    summary = f"a standby, {float(late or 0):.0f} s behind"
    if float(late or 0) > MOST_LATE_S:
        return warn(summary, "Check the replication; exports read the database meanwhile.")
    return good(summary)


def archive(settings: Settings, clock: Clock) -> Finding:
    """Report a store of moved days that does not answer, is another one, or falls behind."""
    found = make_archive(settings)
    with _open_database(settings) as db:
        if current(db) != head():
            return unused("the database has no current schema")
        with db.read() as session:
            border = border_of(session)
            waiting = moving.unmoved(session, clock.now(), settings.events_days)
    if found is None and border is not None:
        return bad(
            f"days up to {border.last_day:%Y-%m-%d} were moved to ClickHouse, and "
            "TOLLHOUSE_EVENTS_URL is not set",
            "Set it to the database that has them.",
        )
    if found is None:
        return unused("raw events and charges stay in the database")
    try:
        found.ping()
        if border is None:
            found.identity()
        else:
            readable(found, border)
    except DependencyDown as error:
        step = "Check TOLLHOUSE_EVENTS_URL; nothing is moved or dropped meanwhile."
        return bad(error.message, step)
    moved = f"days up to {border.last_day:%Y-%m-%d} are moved" if border else "no day is moved yet"
    if waiting.age_s > MOST_UNMOVED_S:
        step = "See the log of the task billing.move_days and `tollhouse worker --dead`."
        late = (
            f"{waiting.days} closed days wait to be moved, the oldest is {waiting.oldest:%Y-%m-%d}"
        )
        return warn(f"{moved}; {late}", step)
    return good(f"ClickHouse answers; {moved}")


def clock_skew(settings: Settings, clock: Clock) -> Finding:
    with _open_database(settings) as db, db.read() as session:
        if db.dialect == "sqlite":
            return good("the database shares this machine's clock")
        database_time = session.scalar(select(func.now()))
    assert isinstance(database_time, datetime)
    skew = abs((clock.now() - database_time.astimezone(UTC)).total_seconds())
    summary = f"{skew:.1f} s between this machine and the database"
    if skew > MOST_SKEW_S:
        return bad(summary, "Synchronise both with NTP: billing periods and prices depend on time.")
    return good(summary)


def spools(settings: Settings, clock: Clock) -> Finding:
    """Report usage records that are in this machine's spools and not yet in the database."""
    counts = spool_counts(settings)
    summary = (
        f"{counts.unshipped} records to ship, {counts.running} requests open, "
        f"{counts.parked} parked"
    )
    if counts.parked:
        return bad(
            summary,
            "`tollhouse usage parked list` shows the reasons; `tollhouse usage parked release` retries.",
        )
    if counts.oldest is not None and clock.now().timestamp() - counts.oldest > MOST_SPOOL_AGE_S:
        return warn(summary, "Start a gateway with this data directory; it ships the records.")
    return good(summary)


def tasks(settings: Settings, clock: Clock) -> Finding:
    """Report queues without a worker, and usage that waits too long to be rated."""
    now = clock.now()
    with _open_database(settings) as db:
        if current(db) != head():
            return unused("the database has no current schema")
        with db.read() as session:
            silent = heartbeats.silent_queues(session, now)
            oldest = session.scalar(
                select(func.min(UsageBatch.recorded_at)).where(
                    UsageBatch.rated_at.is_(None), UsageBatch.refused_at.is_(None)
                )
            )
            refused = session.scalar(
                select(func.count()).where(
                    UsageBatch.rated_at.is_(None), UsageBatch.refused_at.is_not(None)
                )
            )
    waits = (now - oldest).total_seconds() if oldest is not None else 0.0
    backlog = f"usage waits for rating since {waits:.0f} s"
    start = "Start `tollhouse worker`" if settings.broker_url else "Start a gateway"
    if silent:
        summary = f"no worker: {heartbeats.summary_of(silent, now)}"
        dead = waits > MOST_UNRATED_S or any(at is not None for at in silent.values())
        if waits > MOST_UNRATED_S:
            summary += f"; {backlog}"
        return (bad if dead else warn)(summary, f"{start}; its log says why it stopped.")
    if refused:
        return bad(
            f"{refused} batches of usage are not rated, as their events are not all there",
            "`tollhouse audit` counts what is missing; `tollhouse usage rebuild` rates whole ones.",
        )
    if waits > MOST_UNRATED_S:
        return bad(backlog, "Start more workers for the queue rating; see their logs.")
    return good("every queue has a worker")


def failed_items(settings: Settings, _clock: Clock) -> Finding:
    """Report usage events and tasks that failed and need an operator's decision."""
    with _open_database(settings) as db:
        if current(db) is None:
            return unused("the database is empty")
        with db.read() as session:
            waiting = ParkedEvent.released_at.is_(None) & ParkedEvent.dismissed_by.is_(None)
            kinds = session.execute(
                select(ParkedEvent.code, func.count(), func.min(ParkedEvent.reason))
                .where(waiting)
                .group_by(ParkedEvent.code)
                .order_by(ParkedEvent.code)
            ).all()
            dead_letters = session.scalar(
                select(func.count()).select_from(DeadLetter).where(DeadLetter.replayed_at.is_(None))
            )
    summary = f"{sum(row[1] for row in kinds)} parked usage events, {dead_letters} dead letters"
    if kinds or dead_letters:
        reasons = [f"{count} {code}: {reason}" for code, count, reason in kinds]
        return warn(
            "; ".join([summary, *reasons]),
            "Fix the cause, then run `tollhouse usage parked release` (or `drop`) for events, and "
            "`tollhouse worker --replay` for tasks.",
        )
    return good(summary)


def exports(settings: Settings, _clock: Clock) -> Finding:
    """Report scheduled exports whose destination fails."""
    with _open_database(settings) as db:
        if current(db) is None:
            return unused("the database is empty")
        with db.read() as session:
            scheduled = session.scalar(
                select(func.count())
                .select_from(ExportSchedule)
                .where(ExportSchedule.ended_at.is_(None))
            )
            parked = session.execute(
                select(ExportJob.destination, func.count(), func.max(ExportJob.error))
                .where(ExportJob.status == PARKED)
                .group_by(ExportJob.destination)
                .order_by(ExportJob.destination)
            ).all()
            failing = session.execute(
                select(ExportSchedule.destination, func.max(ExportSchedule.last_error))
                .where(ExportSchedule.ended_at.is_(None), ExportSchedule.last_error.is_not(None))
                .group_by(ExportSchedule.destination)
                .order_by(ExportSchedule.destination)
            ).all()
    if parked:
        reasons = [f"{count} for {where}: {reason}" for where, count, reason in parked]
        return bad(
            "; ".join(["exports are parked", *reasons]),
            "Fix the destination, then run `tollhouse export retry`.",
        )
    if failing:
        reasons = [f"{where}: {reason}" for where, reason in failing]
        return warn("; ".join(reasons), "Fix the destination; the export is retried.")
    return good(f"{scheduled} scheduled") if scheduled else unused("no export is scheduled")


@contextmanager
def _open_database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.effective_database_url, limits=Limits(connect_s=2))
    try:
        yield database
    finally:
        database.close()


def erasures(settings: Settings, _clock: Clock) -> Finding:
    """Report what was erased and is back in a database that was restored from a backup."""
    journal = Journal(settings, Sealer(known_operator_token(settings)))
    database = Database(settings.effective_database_url, limits=Limits(connect_s=2))
    try:
        if current(database) != head():
            return unused("the database has no current schema")
        with database.read() as session:
            pending, unreadable = journal.pending(session)
    finally:
        database.close()
    if unreadable:
        return bad(
            f"{len(unreadable)} erasures were noted under another operator token, and are not done.",
            "Restore TOLLHOUSE_ADMIN_TOKEN, or the file admin-token of the data directory.",
        )
    if pending:
        return bad(
            f"{len(pending)} erasures are not done in this database: it was restored from a backup, or "
            "they were interrupted.",
            "Run `tollhouse recover`, which repeats them.",
        )
    return good("the database has every erasure of the journal")


def history(settings: Settings, clock: Clock) -> Finding:
    """Report a database that was restored from a backup and not recovered."""
    database = Database(settings.effective_database_url, limits=Limits(connect_s=2))
    try:
        if current(database) != head():
            return unused("the database has no current schema")
        found = guard.check(database, settings, clock, everywhere=True)
        with database.read() as session:
            last = marks.latest(session)
    finally:
        database.close()
    if found is not None:
        return bad(
            f"the database was restored from a backup; nothing is numbered or collected. {found.reason}",
            restores.NEXT_STEP,
        )
    if last is None:
        return unused("nothing is marked yet")
    summary = f"mark {last.position} of {last.at:%Y-%m-%d %H:%M} UTC"
    here = marks.filed([places.local(settings)])
    if not here and settings.database_url and not settings.restore_store:
        return warn(
            f"{summary} is not kept on this machine",
            "Set TOLLHOUSE_RESTORE_STORE, so that every machine notices a restore.",
        )
    return good(summary)
