"""`tollhouse export`: the verbs for export schedules."""

import argparse
from typing import Any

from sqlalchemy import select

from billing.exports import schedules
from billing.exports.documents import job_json, schedule_json
from billing.exports.formats import Format
from billing.exports.stores import open_store
from billing.exports.writing import NAMES
from billing.models import ExportJob
from core.tenants.scope import scope_of_operator
from gateway.commands._tenants import tenant_id_of
from gateway.console import add_json, say, show
from gateway.toolbox import toolbox


def add_export_schedules(verbs: Any) -> None:
    plan = verbs.add_parser("schedule", help="write an export each day, week or month")
    plan.add_argument("what", choices=NAMES)
    plan.add_argument(
        "--to", dest="destination", required=True, help="directory, or s3://bucket/path"
    )
    plan.add_argument("--every", choices=schedules.EVERY, default="day")
    plan.add_argument("--format", choices=list(Format), default="csv")
    plan.add_argument("--tenant", help="name or id; default: all tenants")
    plan.add_argument(
        "--delay-hours",
        type=int,
        default=schedules.USUAL_DELAY_HOURS,
        help="hours to wait after the end of a period for late usage",
    )
    plan.set_defaults(run=_schedule)
    planned = verbs.add_parser("schedules", help="list schedules, with the last error of each")
    planned.set_defaults(run=_schedules)
    rest = verbs.add_parser("pause", help="pause a schedule until it is resumed")
    rest.set_defaults(run=_change, change=schedules.pause, said="paused")
    go_on = verbs.add_parser(
        "resume", help="resume a paused schedule; exports that fell due meanwhile are skipped"
    )
    go_on.set_defaults(run=_change, change=schedules.resume, said="resumed")
    stop = verbs.add_parser("unschedule", help="end a schedule")
    stop.set_defaults(run=_change, change=schedules.end, said="ended")
    for each in (rest, go_on, stop):
        each.add_argument("schedule", help="the schedule's id")
    jobs = verbs.add_parser("jobs", help="list export jobs, newest first")
    jobs.add_argument("--status", choices=("pending", "running", "done", "parked"))
    jobs.add_argument("--limit", type=int, default=50)
    jobs.set_defaults(run=_jobs)
    again = verbs.add_parser("retry", help="retry parked export jobs now")
    again.add_argument("job", nargs="?", help="the job's id; default: all")
    again.set_defaults(run=_retry)
    for each in (plan, planned, rest, go_on, stop, jobs, again):
        add_json(each)


def _schedule(arguments: argparse.Namespace) -> int:
    with toolbox() as tools, tools.database.transaction() as session:
        made = schedules.schedule(
            session,
            tools.clock,
            lambda destination: open_store(destination, tools.settings),
            what=arguments.what,
            form=arguments.format,
            destination=arguments.destination,
            every=arguments.every,
            tenant_id=tenant_id_of(session, arguments.tenant) if arguments.tenant else None,
            delay_hours=arguments.delay_hours,
        )
        shown = schedule_json(made)
    show(shown, as_json=arguments.json, title="schedule")
    return 0


def _schedules(arguments: argparse.Namespace) -> int:
    with toolbox() as tools, tools.database.read() as session:
        rows = [schedule_json(each) for each in schedules.open_ones(session)]
    show(rows, as_json=arguments.json, title="schedules")
    return 0


def _change(arguments: argparse.Namespace) -> int:
    with toolbox() as tools, tools.database.transaction() as session:
        arguments.change(schedules.find(session, arguments.schedule), tools.clock.now())
    say(f"{arguments.schedule} is {arguments.said}.")
    return 0


def _jobs(arguments: argparse.Namespace) -> int:
    with toolbox() as tools, tools.database.read() as session:
        query = select(ExportJob).order_by(ExportJob.id.desc()).limit(arguments.limit)
        if arguments.status:
            query = query.where(ExportJob.status == arguments.status)
        rows = [job_json(each) for each in session.scalars(query)]
    show(rows, as_json=arguments.json, title="exports")
    return 0


def _retry(arguments: argparse.Namespace) -> int:
    with toolbox() as tools:
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
