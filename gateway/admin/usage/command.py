"""`tollhouse usage`: usage and cost by day, imported events, parked events, and roll-ups."""

import argparse
import json
from typing import Any

from sqlalchemy import func, select

from billing.closing.late_receipts import waive_late
from billing.rating import repair
from billing.rating.rating_worker import rate_all
from billing.usage import usage
from billing.usage.tables import DailyUsage
from core.money import decimal_of
from core.tenants.operator import operator_token
from gateway.admin.console.context import command_context
from gateway.admin.console.files import text_of
from gateway.admin.console.options import scope_named
from gateway.admin.console.output import add_json, show
from gateway.admin.console.tenants import tenant_id_of
from gateway.admin.erasures.end_users import erase_everywhere
from gateway.admin.usage import parked_command as _parked_usage
from gateway.admin.usage import report_command as _reported_usage
from gateway.edge.datetimes import parse_datetime
from gateway.metering.spool_watch import wait_until_shipped

HELP = "show usage and cost by day; import events; handle parked events"
_GROUPS = ("model", "project_id", "key_id", "adapter")


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    days = verbs.add_parser("show", help="show usage and cost by day")
    days.add_argument("--tenant", required=True)
    days.add_argument("--from", dest="start", metavar="DATE", help="first day, UTC")
    days.add_argument("--to", dest="end", metavar="DATE", help="day after the last, UTC")
    days.add_argument("--by", choices=_GROUPS, default="model", help="group within a day")
    days.set_defaults(run=_show)
    import_verb = verbs.add_parser("import", help="import usage events from JSON Lines")
    import_verb.add_argument("file", help="one event per line; `-` is stdin")
    import_verb.set_defaults(run=_import)
    report_verb = verbs.add_parser(
        "report", help="store CloudEvents of usage that Tollhouse did not serve"
    )
    report_verb.add_argument("file", help="a JSON list, or one event per line; `-` is stdin")
    report_verb.set_defaults(run=_reported_usage.report)
    parked = verbs.add_parser(
        "parked", help="list, release or drop events that cannot be stored or rated"
    )
    _parked_usage.configure(parked)
    release = verbs.add_parser("release", help="retry the parked events")
    release.set_defaults(run=_parked_usage.release)
    dismiss = verbs.add_parser("dismiss", help="close a parked event without billing it")
    dismiss.add_argument("request_id")
    dismiss.add_argument("--by", required=True, help="who decides; recorded with the event")
    dismiss.set_defaults(run=_dismiss)
    erase = verbs.add_parser(
        "erase", help="erase an end user's name and texts; counts and amounts stay"
    )
    erase.add_argument("--tenant", required=True)
    erase.add_argument(
        "--end-user",
        required=True,
        help="as given in `user`, `safety_identifier` or `metadata.user_id`",
    )
    erase.set_defaults(run=_erase)
    rebuild = verbs.add_parser(
        "rebuild", help="rate events that have no charge, and rebuild all roll-ups"
    )
    rebuild.set_defaults(run=_rebuild)
    for each in (days, import_verb, report_verb, release, dismiss, erase, rebuild):
        add_json(each)


def _erase(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        wait_until_shipped(tools.settings)
        with tools.database.read() as session:
            scope = scope_named(session, arguments.tenant)
        token = operator_token(tools.settings)
        erased = erase_everywhere(tools.database, scope, tools.clock, token, arguments.end_user)
    show(erased, as_json=arguments.json, title="erased")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        wait_until_shipped(tools.settings)
        rate_all(tools.database, tools.clock)
        group = getattr(DailyUsage, arguments.by)
        sums = ("requests", "input_tokens", "cached_tokens", "output_tokens", "waived_tokens")
        columns = [func.sum(getattr(DailyUsage, name)).label(name) for name in sums]
        query = select(
            DailyUsage.at, group, DailyUsage.currency, *columns, func.sum(DailyUsage.amount)
        ).group_by(DailyUsage.at, group, DailyUsage.currency)
        with tools.database.read() as session:
            query = query.where(DailyUsage.tenant_id == tenant_id_of(session, arguments.tenant))
            if arguments.start:
                query = query.where(DailyUsage.at >= parse_datetime(arguments.start))
            if arguments.end:
                query = query.where(DailyUsage.at < parse_datetime(arguments.end))
            rows = session.execute(query.order_by(DailyUsage.at, group)).all()
    shown = [
        {
            "day": f"{row[0]:%Y-%m-%d}",
            arguments.by: row[1] or "-",
            **{name: int(row[3 + index]) for index, name in enumerate(sums)},
            "amount": decimal_of(int(row[8])),
            "currency": row[2],
        }
        for row in rows
    ]
    show(shown, as_json=arguments.json, title="usage")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    """Import idempotently; events that cannot be billed are parked."""
    with command_context() as tools:
        text = text_of(arguments.file)
        with tools.database.transaction() as session:
            new = usage.record_raw(
                session, map(_json, filter(str.strip, text.splitlines())), tools.clock
            )
            waiting = len(usage.parked(session))
    show({"new": new, "parked": waiting}, as_json=arguments.json, title="imported")
    return 0


def _json(line: str) -> Any:
    """Parse a line. A line that is not JSON is kept as text, so that it is parked and not lost."""
    try:
        return json.loads(line)
    except ValueError:
        return {"line": line}


def _dismiss(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        usage.dismiss(session, arguments.request_id, arguments.by)
    show({"dismissed": arguments.request_id}, as_json=arguments.json)
    return 0


def _rebuild(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        waive_late(tools.database, tools.clock)
        repaired = repair.repair(tools.database, tools.clock)
    show(repaired.describe(), as_json=arguments.json)
    return 0
