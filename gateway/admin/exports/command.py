"""`tollhouse export`: writes usage, charges, invoices, ledger or FOCUS, now or on a schedule."""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.exports import schedules
from billing.exports.encoding import (
    FOCUS,
    NAMES,
    Export,
    chunks_of,
    column_names,
    export_of,
    format_of,
)
from billing.exports.focus.metadata import file_json
from billing.exports.focus.tables import (
    COST_AND_USAGE,
    DATASETS,
    DEFAULT_VERSION,
    VERSIONS,
    table_of,
)
from billing.exports.formats import Format
from billing.exports.subjects import Period
from billing.exports.tables import ExportJob
from billing.exports.views import job_json, schedule_json
from billing.periods import zone_of
from billing.rating.rating_worker import rate_all
from billing.stores import open_store
from core.errors import BadRequest
from core.tenants.scope import scope_of_operator
from gateway.admin.configuration.command import add_config_export
from gateway.admin.console import command_context, tenant_id_of
from gateway.admin.ledger.journal_command import add_journal
from gateway.admin.output import add_json, say, show
from gateway.edge.decoding import parse_datetime
from gateway.metering.spool_watch import wait_until_shipped


def add_export_schedules(verbs: Any) -> None:
    schedule_verb = verbs.add_parser("schedule", help="write an export each day, week or month")
    schedule_verb.add_argument("what", choices=NAMES)
    schedule_verb.add_argument(
        "--to", dest="destination", required=True, help="directory, or s3://bucket/path"
    )
    schedule_verb.add_argument("--every", choices=schedules.EVERY, default="day")
    _add_focus(schedule_verb)
    schedule_verb.add_argument("--format", choices=list(Format), default="csv")
    schedule_verb.add_argument("--tenant", help="name or id; default: all tenants")
    schedule_verb.add_argument(
        "--delay-hours",
        type=int,
        default=schedules.DEFAULT_DELAY_HOURS,
        help="hours to wait after the end of a period for late usage",
    )
    schedule_verb.set_defaults(run=_schedule)
    list_verb = verbs.add_parser("schedules", help="list schedules, with the last error of each")
    list_verb.set_defaults(run=_schedules)
    pause = verbs.add_parser("pause", help="pause a schedule until it is resumed")
    pause.set_defaults(run=_change, change=schedules.pause, done_label="paused")
    resume = verbs.add_parser(
        "resume", help="resume a paused schedule; exports that fell due meanwhile are skipped"
    )
    resume.set_defaults(run=_change, change=schedules.resume, done_label="resumed")
    change = verbs.add_parser(
        "change", help="write another FOCUS version, dataset or choice of columns"
    )
    _add_focus(change)
    change.set_defaults(run=_change_table, what=FOCUS)
    end = verbs.add_parser("unschedule", help="end a schedule")
    end.set_defaults(run=_change, change=schedules.end, done_label="ended")
    for each in (pause, resume, change, end):
        each.add_argument("schedule", help="the schedule's id")
    jobs = verbs.add_parser("jobs", help="list export jobs, newest first")
    jobs.add_argument("--status", choices=("pending", "running", "done", "parked"))
    jobs.add_argument("--limit", type=int, default=50)
    jobs.set_defaults(run=_jobs)
    retry = verbs.add_parser("retry", help="retry parked export jobs now")
    retry.add_argument("job", nargs="?", help="the job's id; default: all")
    retry.set_defaults(run=_retry)
    for each in (schedule_verb, list_verb, pause, resume, change, end, jobs, retry):
        add_json(each)


def _schedule(arguments: argparse.Namespace) -> int:
    export = _export_named(arguments)
    with command_context() as tools, tools.database.transaction() as session:
        created = schedules.schedule(
            session,
            tools.clock,
            lambda destination: open_store(destination, tools.settings),
            what=export,
            form=arguments.format,
            destination=arguments.destination,
            every=arguments.every,
            tenant_id=tenant_id_of(session, arguments.tenant) if arguments.tenant else None,
            delay_hours=arguments.delay_hours,
        )
        shown = schedule_json(created)
    show(shown, as_json=arguments.json, title="schedule")
    return 0


def _schedules(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        rows = [schedule_json(each) for each in schedules.open_schedules(session)]
    show(rows, as_json=arguments.json, title="schedules")
    return 0


def _change(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        arguments.change(schedules.find(session, arguments.schedule), tools.clock.now())
    say(f"{arguments.schedule} is {arguments.done_label}.")
    return 0


def _change_table(arguments: argparse.Namespace) -> int:
    export = _export_named(arguments)
    with command_context() as tools, tools.database.transaction() as session:
        found = schedules.find(session, arguments.schedule)
        schedules.change_table(found, export)
        shown = schedule_json(found)
    show(shown, as_json=arguments.json, title="schedule")
    return 0


def _jobs(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        query = select(ExportJob).order_by(ExportJob.id.desc()).limit(arguments.limit)
        if arguments.status:
            query = query.where(ExportJob.status == arguments.status)
        rows = [job_json(each) for each in session.scalars(query)]
    show(rows, as_json=arguments.json, title="exports")
    return 0


def _retry(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        with tools.database.transaction() as session:
            count = schedules.retry(session, tools.clock.now(), arguments.job)
        done, failed = schedules.run_waiting(
            tools.database,
            tools.clock,
            lambda where: open_store(where, tools.settings),
            scope_of_operator,
        )
    show(
        {"retried": count, "done": done, "failed": failed}, as_json=arguments.json, title="exports"
    )
    return 1 if failed else 0


HELP = "write usage, charges, invoices, the ledger or FOCUS, now or on a schedule"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    kinds = verbs.add_parser("list", help="list the exports and their columns")
    kinds.set_defaults(run=_list)
    write = verbs.add_parser("run", help="write one export")
    write.add_argument("what", choices=NAMES)
    write.add_argument("--tenant", help="name or id; default: all tenants")
    _add_focus(write)
    write.add_argument("--format", choices=list(Format), default="csv")
    write.add_argument("--from", dest="start", metavar="DATE", help="first day")
    write.add_argument("--to", dest="end", metavar="DATE", help="day after the last")
    write.add_argument(
        "--time-zone", metavar="NAME", default="UTC", help="of --from and --to (default: UTC)"
    )
    write.add_argument("--output", metavar="FILE", help="default, and `-`: stdout")
    write.set_defaults(run=_run)
    add_export_schedules(verbs)
    add_config_export(verbs)
    add_journal(verbs)
    for each in (kinds, write):
        add_json(each)


def _list(arguments: argparse.Namespace) -> int:
    rows = [
        {"what": name, "columns": [column.name for column in export_of(name).columns]}
        for name in NAMES
        if name != FOCUS
    ]
    for version in VERSIONS:
        for dataset in DATASETS:
            table = table_of(version, dataset)
            if table is not None:
                rows.append({"what": f"focus {version} {dataset}", "columns": [*table.names]})
    show(rows, as_json=arguments.json, title="exports")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    _export_named(arguments)  # refuses a wrong choice before anything is read
    with command_context() as tools:
        wait_until_shipped(tools.settings)
        rate_all(tools.database, tools.clock)
        period = _period(tools.clock.now(), arguments)
        with tools.database.report(fresh=True) as session:
            chunks = _chunks(session, arguments, period)
            if arguments.output in (None, "-"):
                for chunk in chunks:
                    sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
                return 0
            written = _write(Path(arguments.output), chunks)
            written |= _beside(Path(arguments.output), arguments, tools.clock.now())
    show(written, as_json=arguments.json, title="export")
    return 0


def _chunks(session: Session, arguments: argparse.Namespace, period: Period) -> Iterator[bytes]:
    tenant = arguments.tenant
    scope = scope_of_operator(tenant_id_of(session, tenant), "command line") if tenant else None
    return chunks_of(session, _export_named(arguments), format_of(arguments.format), scope, period)


def _write(path: Path, chunks: Iterator[bytes]) -> dict[str, object]:
    """Write to a temporary name first, so that no partial file appears under `path`."""
    beside = path.with_name(f".{path.name}.part")
    digest, size = hashlib.sha256(), 0
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        with (
            beside.open("wb") as file,
            Progress(
                TextColumn("writing"),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=Console(stderr=True),
                disable=not sys.stderr.isatty(),
            ) as progress,
        ):
            bar = progress.add_task("", total=None)
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                progress.update(bar, completed=size)
        beside.replace(path)
    except OSError as error:
        raise BadRequest(f"{path} cannot be written: {error.strerror}.") from None
    say(f"wrote {path}")
    return {"file": str(path), "bytes": size, "sha256": digest.hexdigest()}


def _beside(path: Path, arguments: argparse.Namespace, now: datetime) -> dict[str, object]:
    """The metadata of a FOCUS file, under its name with `.metadata.json`."""
    table = _export_named(arguments).table
    if table is None:
        return {}
    target = path.with_name(f"{path.name}.metadata.json")
    target.write_text(json.dumps(file_json(table, now), indent=1))
    return {"metadata": str(target)}


def _period(now: datetime, arguments: argparse.Namespace) -> Period:
    zone, start, end = zone_of(arguments.time_zone), arguments.start, arguments.end
    until = parse_datetime(end, "--to", zone) if end else now
    since = parse_datetime(start, "--from", zone) if start else until - timedelta(days=31)
    if since >= until:
        raise BadRequest("--from is not before --to.", next_step="Give an earlier --from.")
    return Period(since, until)


def _add_focus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--focus-version",
        default="",
        metavar="VERSION",
        help=f"of focus: {', '.join(VERSIONS)}; default: {DEFAULT_VERSION}",
    )
    parser.add_argument(
        "--dataset",
        default="",
        help=f"of focus: {', '.join(DATASETS)}; default: {COST_AND_USAGE}",
    )
    parser.add_argument(
        "--columns", default="", metavar="A,B", help="of focus: only these columns, in this order"
    )


def _export_named(arguments: argparse.Namespace) -> Export:
    columns = column_names(arguments.columns)
    return export_of(arguments.what, arguments.focus_version, arguments.dataset, columns)
