"""Scheduled exports: each day, week or month in UTC becomes a job, and each job writes one file.

A job is created in the transaction that advances its schedule, so none is missed or duplicated. Its
file name is derived from its content, so a job that runs twice writes the same file. A job that keeps
failing is parked with the reason until it is retried by hand. A job of FOCUS writes a file for each
billing period that may have changed (`focus/delivery.py`).
"""

import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Update, func, select, update
from sqlalchemy.orm import Session

from billing.accounts.accounts import ensure_account, lock_account
from billing.exports.encoding import FOCUS, Export, export_of, format_of, rows_of
from billing.exports.focus import delivery
from billing.exports.focus.tables import FIRST_VERSION
from billing.exports.formats import Format, Row, encode
from billing.exports.subjects import Period
from billing.exports.tables import ExportJob, ExportSchedule
from billing.invoicing import invoice_run
from billing.notices import webhooks
from billing.stores import Store, own_folder
from core.clock import Clock
from core.database import Database
from core.errors import BadRequest, Conflict, NotFound
from core.ids import new_id
from core.tenants.scope import TenantScope

log = logging.getLogger("tollhouse.exports")
EVERY = ("day", "week", "month")
PENDING, RUNNING, DONE, PARKED = "pending", "running", "done", "parked"
MAX_ATTEMPTS = 6
LEASE = timedelta(hours=1)  # another worker takes the job after it
DEFAULT_DELAY_HOURS = 2  # for usage that arrives late
MAX_SCHEDULES_PER_TENANT = 20  # schedules that a tenant may create

StoreOf = Callable[[str], Store]  # by destination
ScopeOf = Callable[[str], TenantScope]  # by tenant; the caller vouches for it


def schedule(
    session: Session,
    clock: Clock,
    store_of: StoreOf,
    *,
    what: str | Export,
    form: str,
    destination: str,
    every: str,
    tenant_id: str | None = None,
    delay_hours: int = DEFAULT_DELAY_HOURS,
) -> ExportSchedule:
    """Create a schedule from the current day, week or month on. BadRequest if the destination is not
    writable.
    """
    export = export_of(what) if isinstance(what, str) else what
    format_of(form)
    if every not in EVERY:
        raise BadRequest(
            f"every is {every!r}; it must be one of {', '.join(EVERY)}.", param="every"
        )
    if not 0 <= delay_hours <= 24 * 28:
        raise BadRequest(
            f"delay_hours is {delay_hours}; it must be 0 to {24 * 28}.", param="delay_hours"
        )
    try:
        store_of(destination).probe()
    except BadRequest:
        raise
    except Exception as error:
        raise BadRequest(
            f"{destination} is not writable: {_describe(error)}.",
            next_step="Make it writable, or choose another destination.",
            param="destination",
        ) from error
    now = clock.now()
    made = ExportSchedule(
        id=new_id("sched"),
        tenant_id=tenant_id,
        what=export.what,
        format=form,
        destination=destination,
        options={"delay_hours": delay_hours, **_focus_options(export)},
        every=every,
        next_at=_after(_floor(now, every), every) + timedelta(hours=delay_hours),
        created_at=now,
    )
    session.add(made)
    session.flush()
    return made


def schedule_own(
    session: Session,
    clock: Clock,
    store_of: StoreOf,
    *,
    tenant_id: str,
    what: str | Export,
    form: str,
    destination: str,
    every: str,
    delay_hours: int = DEFAULT_DELAY_HOURS,
) -> ExportSchedule:
    """Create a schedule for a tenant: its own rows, into a folder of its own."""
    ensure_account(session, tenant_id, clock.now())
    lock_account(session, tenant_id)  # so that concurrent requests cannot exceed the limit
    if len(open_schedules(session, tenant_id)) >= MAX_SCHEDULES_PER_TENANT:
        raise Conflict(
            f"The tenant has {MAX_SCHEDULES_PER_TENANT} export schedules, the maximum.",
            next_step="End one of them first.",
        )
    return schedule(
        session,
        clock,
        store_of,
        what=what,
        form=form,
        destination=own_folder(tenant_id, destination),
        every=every,
        tenant_id=tenant_id,
        delay_hours=delay_hours,
    )


def open_schedules(session: Session, tenant_id: str | None = None) -> Sequence[ExportSchedule]:
    """Schedules that have not ended, including paused ones; all tenants' by default."""
    query = select(ExportSchedule).where(ExportSchedule.ended_at.is_(None))
    if tenant_id is not None:
        query = query.where(ExportSchedule.tenant_id == tenant_id)
    return session.scalars(query.order_by(ExportSchedule.id)).all()


def find(session: Session, schedule_id: str, tenant_id: str | None = None) -> ExportSchedule:
    """Lock and return a schedule. NotFound if it has ended or belongs to another tenant; without
    `tenant_id` any tenant's is found.
    """
    found = session.get(ExportSchedule, schedule_id, with_for_update=True)
    foreign = found is not None and tenant_id is not None and found.tenant_id != tenant_id
    if found is None or found.ended_at is not None or foreign:
        raise NotFound(
            f"There is no schedule {schedule_id!r}.",
            next_step="List schedules with: tollhouse export schedules",
        )
    return found


def pause(which: ExportSchedule, now: datetime) -> None:
    which.paused_at = which.paused_at or now


def resume(which: ExportSchedule, now: datetime) -> None:
    """Resume a paused schedule. Periods that ended meanwhile are skipped; export them by hand."""
    if which.paused_at is None:
        return
    which.paused_at = None
    delay = timedelta(hours=int(which.options["delay_hours"]))
    while which.next_at <= now:
        which.next_at = _after(which.next_at - delay, which.every) + delay


def change_table(which: ExportSchedule, export: Export) -> None:
    """Write another FOCUS version, dataset or choice of columns from the next file on. Its files have
    other names, and all periods since the schedule began are written again."""
    if which.what != FOCUS or export.table is None:
        raise BadRequest(
            f"The schedule exports {which.what}, which has no FOCUS version.",
            next_step="Create a schedule of focus.",
            param="focus_version",
        )
    kept = {"delay_hours": which.options["delay_hours"]}
    which.options = {**kept, **_focus_options(export)}


def export_of_options(what: str, options: Mapping[str, Any]) -> Export:
    """What a schedule or a job writes; those of FOCUS that name no version keep the first one."""
    if what != FOCUS:
        return export_of(what)
    table = options.get(FOCUS) or {"version": FIRST_VERSION}
    return export_of(
        what, table["version"], table.get("dataset", ""), tuple(table.get("columns", ()))
    )


def _focus_options(export: Export) -> dict[str, Any]:
    """`columns` only if some were chosen: another release may have more."""
    if export.table is None:
        return {}
    chosen = {"version": export.table.version, "dataset": export.table.dataset}
    whole = export_of(FOCUS, *chosen.values())
    columns = {} if whole == export else {"columns": list(export.table.names)}
    return {FOCUS: {**chosen, **columns}}


def end(which: ExportSchedule, now: datetime) -> None:
    which.ended_at = now


def create_due_jobs(session: Session, now: datetime) -> None:
    """Create a job for each ended period, including those missed while nothing ran; of FOCUS, for the
    last one."""
    due = session.scalars(
        select(ExportSchedule)
        .where(
            ExportSchedule.ended_at.is_(None),
            ExportSchedule.paused_at.is_(None),
            ExportSchedule.next_at <= now,
        )
        .order_by(ExportSchedule.id)
        .with_for_update(skip_locked=True)
    ).all()
    for each in due:
        delay = timedelta(hours=int(each.options["delay_hours"]))
        due_spans = []
        while each.next_at <= now:
            until = each.next_at - delay
            due_spans.append(Period(_before(until, each.every), until))
            each.next_at = _after(until, each.every) + delay
        if each.what == FOCUS:  # one delivery has all that the missed ones would have had
            due_spans = due_spans[-1:]
        session.add_all(_job(each, span, now) for span in due_spans)
    session.flush()


def run_waiting(
    database: Database, clock: Clock, store_of: StoreOf, scope_of: ScopeOf
) -> tuple[int, int]:
    """Run every waiting job; returns how many succeeded and how many failed."""
    done = failed = 0
    while True:
        with database.transaction() as session:
            claimed = _claim(session, clock.now())
        if claimed is None:
            return done, failed
        try:
            _check_workers(claimed)
            written = _write(database, clock, claimed, store_of, scope_of)
        except Exception as error:
            log.warning("export %s failed: %s", claimed.id, _describe(error))
            with database.transaction() as session:
                _fail(session, claimed, _describe(error), clock.now())
            failed += 1
            continue
        with database.transaction() as session:
            _finish(session, claimed, written, clock.now())
        done += 1


def retry(session: Session, now: datetime, job_id: str | None = None) -> int:
    """Requeue all parked jobs, or one of them; returns how many."""
    query = update(ExportJob).where(ExportJob.status == PARKED)
    if job_id is not None:
        query = query.where(ExportJob.id == job_id)
    result = session.execute(query.values(status=PENDING, attempts=0, next_at=now))
    count = int(result.rowcount)  # type: ignore[attr-defined]
    if job_id is not None and count == 0:
        raise NotFound(
            f"There is no parked export {job_id!r}.",
            next_step="List export jobs with: tollhouse export jobs",
        )
    return count


def parked(session: Session) -> int:
    """The number of parked jobs."""
    query = select(func.count()).select_from(ExportJob).where(ExportJob.status == PARKED)
    return session.scalar(query) or 0


@dataclass(frozen=True, slots=True)
class _Written:
    rows: int
    size: int  # bytes
    sha256: str
    address: str
    delivered: Mapping[str, Any] | None = None  # options of the schedule


def _job(of: ExportSchedule, period: Period, now: datetime) -> ExportJob:
    return ExportJob(
        id=new_id("exp"),
        tenant_id=of.tenant_id,
        what=of.what,
        format=of.format,
        starts_at=period.start,
        ends_at=period.end,
        destination=of.destination,
        schedule_id=of.id,
        status=PENDING,
        created_at=now,
        next_at=now,
    )


def _claim(session: Session, now: datetime) -> ExportJob | None:
    job = session.scalar(
        select(ExportJob)
        .where(ExportJob.status.in_((PENDING, RUNNING)), ExportJob.next_at <= now)
        .order_by(ExportJob.next_at, ExportJob.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    if job is not None:
        job.status, job.attempts, job.next_at = RUNNING, job.attempts + 1, now + LEASE
    return job


def _check_workers(claimed: ExportJob) -> None:
    """Stop retrying a job that keeps killing its workers, e.g. for lack of memory or disk."""
    if claimed.attempts > MAX_ATTEMPTS:
        raise RuntimeError(
            f"its worker died {MAX_ATTEMPTS} times; check the worker's memory and disk"
        )


def _write(
    database: Database, clock: Clock, job: ExportJob, store_of: StoreOf, scope_of: ScopeOf
) -> _Written:
    scope = scope_of(job.tenant_id) if job.tenant_id else None
    if job.what == FOCUS:
        return _write_focus(database, clock, job, store_of, scope)
    return _write_file(database, job, store_of, scope)


def _write_file(
    database: Database, job: ExportJob, store_of: StoreOf, scope: TenantScope | None
) -> _Written:
    """Write to a temporary file first, so that the store gets a complete file or none."""
    form, rows = Format(job.format), 0
    export = export_of(job.what)
    digest = hashlib.sha256()

    def _counted(source: Iterator[Row]) -> Iterator[Row]:
        nonlocal rows
        for row in source:
            rows += 1
            yield row

    with tempfile.TemporaryDirectory(prefix="tollhouse-export-") as folder:
        path = Path(folder) / "export"
        with database.report(fresh=True) as session, path.open("wb") as file:
            source = rows_of(session, export, scope, Period(job.starts_at, job.ends_at))
            for chunk in encode(_counted(source), export.columns, form):
                digest.update(chunk)
                file.write(chunk)
        name = f"{job.what}-{job.tenant_id or 'all'}-{job.starts_at:%Y%m%d}-{job.ends_at:%Y%m%d}"
        put = store_of(job.destination).put
        address = put(f"{name}.{form.value}", path, form.media_type, digest.hexdigest())
        return _Written(rows, path.stat().st_size, digest.hexdigest(), address)


def _write_focus(
    database: Database,
    clock: Clock,
    job: ExportJob,
    store_of: StoreOf,
    scope: TenantScope | None,
) -> _Written:
    """The billing periods that may have changed; those that run are drafted as of now first."""
    now = clock.now()
    tenants = None if scope is None else [scope.tenant_id]
    invoice_run.run(database, clock, tenants, final=False)
    with database.read() as session:
        found = session.get_one(ExportSchedule, job.schedule_id)
        known, began = dict(found.options), found.created_at
    table = export_of_options(job.what, known).table
    assert table is not None
    at = known.get("delivered_at")
    wanted = delivery.Delivery(
        table,
        Format(job.format),
        scope,
        found.id,
        began,
        now,
        datetime.fromisoformat(at) if at else None,
        known.get("files", {}),
    )
    with database.report(fresh=True) as session:
        done = delivery.deliver(session, wanted, store_of(job.destination).put)
    kept = {"delivered_at": now.isoformat(), "files": done.files, FOCUS: known.get(FOCUS)}
    return _Written(done.rows, done.size, done.sha256, done.address, kept)


def _finish(session: Session, claimed: ExportJob, written: _Written, now: datetime) -> None:
    done = _if_still_leased(claimed).values(
        status=DONE,
        rows=written.rows,
        bytes=written.size,
        sha256=written.sha256,
        address=written.address,
        error=None,
        done_at=now,
    )
    if not _updated(session, done):
        return
    _keep_delivered(session, claimed, written)
    _set_schedule_error(session, claimed, None)
    _notify(session, claimed, "export.done", now, rows=written.rows, sha256=written.sha256)


def _keep_delivered(session: Session, job: ExportJob, written: _Written) -> None:
    """What was delivered, unless the schedule writes another table by now."""
    if written.delivered is None:
        return
    found = session.get(ExportSchedule, job.schedule_id, with_for_update=True)
    if found is not None and found.options.get(FOCUS) == written.delivered[FOCUS]:
        found.options = {**found.options, **written.delivered}


def _fail(session: Session, claimed: ExportJob, reason: str, now: datetime) -> None:
    last = claimed.attempts >= MAX_ATTEMPTS
    pause = timedelta(minutes=min(60, 2**claimed.attempts))
    status = PARKED if last else PENDING
    if not _updated(
        session, _if_still_leased(claimed).values(status=status, error=reason, next_at=now + pause)
    ):
        return
    _set_schedule_error(session, claimed, reason)
    if last:
        _notify(session, claimed, "export.parked", now, reason=reason)


def _if_still_leased(claimed: ExportJob) -> Update:
    """Update the job only if this worker still holds its lease."""
    return update(ExportJob).where(
        ExportJob.id == claimed.id,
        ExportJob.attempts == claimed.attempts,
        ExportJob.status == RUNNING,
    )


def _updated(session: Session, change: Update) -> bool:
    return bool(session.execute(change).rowcount)  # type: ignore[attr-defined]


def _set_schedule_error(session: Session, job: ExportJob, error: str | None) -> None:
    session.execute(
        update(ExportSchedule).where(ExportSchedule.id == job.schedule_id).values(last_error=error)
    )


def _notify(session: Session, job: ExportJob, event: str, now: datetime, **more: object) -> None:
    if job.tenant_id is None:
        return
    payload = {
        "export_id": job.id,
        "what": job.what,
        "format": job.format,
        "start": job.starts_at.isoformat(),
        "end": job.ends_at.isoformat(),
        **more,
    }
    subject = f"Export of {job.what}, {job.starts_at:%Y-%m-%d} to {job.ends_at:%Y-%m-%d}"
    webhooks.notify(
        session, [webhooks.Notification(job.tenant_id, event, subject, job.id, payload)], now
    )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")[:500]


def _floor(at: datetime, every: str) -> datetime:
    day = at.replace(hour=0, minute=0, second=0, microsecond=0)
    if every == "week":
        return day - timedelta(days=day.weekday())
    return day.replace(day=1) if every == "month" else day


def _after(start: datetime, every: str) -> datetime:
    """The end of the period that starts here."""
    return _floor(start + timedelta(days={"day": 1, "week": 7, "month": 31}[every]), every)


def _before(until: datetime, every: str) -> datetime:
    return _floor(until - timedelta(days=1), every)
