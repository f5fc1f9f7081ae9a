"""`tollhouse export`: the verbs for export schedules."""

import argparse
from typing import Any

from sqlalchemy import select

from billing.exports import schedules
from billing.exports.encoding import FOCUS, NAMES
from billing.exports.formats import Format
from billing.exports.tables import ExportJob
from billing.exports.views import job_json, schedule_json
from billing.stores import open_store
from core.tenants.scope import scope_of_operator
from gateway.admin.console.context import command_context
from gateway.admin.console.output import add_json, say, show
from gateway.admin.console.tenants import tenant_id_of
from gateway.admin.exports.options import add_focus, export_named


def add_export_schedules(verbs: Any) -> None:
    schedule_verb = verbs.add_parser("schedule", help="write an export each day, week or month")
    schedule_verb.add_argument("what", choices=NAMES)
    schedule_verb.add_argument(
        "--to", dest="destination", required=True, help="directory, or s3://bucket/path"
    )
    schedule_verb.add_argument("--every", choices=schedules.EVERY, default="day")
    add_focus(schedule_verb)
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
    add_focus(change)
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
    export = export_named(arguments)
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
    export = export_named(arguments)
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
