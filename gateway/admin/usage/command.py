"""`tollhouse usage`: usage and cost by day, imported events, parked events, and roll-ups."""

import argparse
import json
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from billing.closing.late_receipts import waive_late
from billing.rating import rating, repair
from billing.rating.rating_worker import rate_all
from billing.usage import reported_usage, service_rollups, usage
from billing.usage.label_buckets import PREFIX, buckets_by_label
from billing.usage.tables import DailyUsage, ParkedEvent
from billing.usage.usage_buckets import BucketQuery, Width
from core.errors import BadRequest, NotFound
from core.money import decimal_of
from core.settings import Settings
from gateway.admin.console import (
    CommandContext,
    command_context,
    scope_named,
    tenant_id_of,
    text_of,
)
from gateway.admin.output import add_json, show
from gateway.admin.stored_data.command import stored_data
from gateway.edge.decoding import parse_datetime
from gateway.metering import parked_records
from gateway.metering.spool_watch import wait_until_shipped
from gateway.metering.streams.storing import release_parked
from gateway.metering.usage_sink import SqlUsageSink

_AT_ONCE = 1000  # events per transaction, as in one call of the API


def _report(arguments: argparse.Namespace) -> int:
    """Every event is read before the first is stored. A file that was stored in part can be sent
    again: known events are not stored twice."""
    reports = [_read_report(number, each) for number, each in _entries(text_of(arguments.file))]
    done = reported_usage.Reported(0, 0)
    with command_context() as tools:
        for first in range(0, len(reports), _AT_ONCE):
            some = reports[first : first + _AT_ONCE]
            with tools.database.transaction() as session:
                done += reported_usage.report(session, tools.clock, some, "operator")
    show(done.describe(), as_json=arguments.json, title="reported")
    return 0


def _entries(text: str) -> list[tuple[int, Any]]:
    """The events with their numbers: of a list, of one event, or of one event per line."""
    try:
        whole = json.loads(text)
    except ValueError:
        lines = enumerate(text.splitlines(), 1)
        return [(number, _report_json(number, line)) for number, line in lines if line.strip()]
    return list(enumerate(whole if isinstance(whole, list) else [whole], 1))


def _report_json(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise _wrong(number, f"it is not JSON: {error}") from None


def _read_report(number: int, payload: Any) -> reported_usage.Report:
    # FastAPI comes with it: 0.6 s that the other verbs of `usage` would wait for.
    from gateway.admin.usage.routes import report_from

    try:
        return report_from(payload)
    except ValueError as error:
        raise _wrong(number, str(error)) from None


def _wrong(number: int, problem: str) -> BadRequest:
    return BadRequest(
        f"Event {number} of the file is refused: {problem}.",
        next_step="Correct it, then send the whole file again: none of it is stored.",
    )


# The verbs of `tollhouse usage parked`: events parked in the database and records parked in this
# machine's spool files.


log = logging.getLogger("tollhouse.usage")


def _add_parked(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=list_parked)
    add_json(parser)
    verbs = parser.add_subparsers(metavar="verb")
    add_json(listed := verbs.add_parser("list", help="list parked events with the reason"))
    listed.set_defaults(run=list_parked)
    add_json(released := verbs.add_parser("release", help="retry every parked event"))
    released.set_defaults(run=_release)
    dropped = verbs.add_parser("drop", help="close a parked event without billing it")
    dropped.add_argument("id", help="request id, or FILE:NUMBER of a spool record, as listed")
    dropped.add_argument("--by", required=True, help="who decides; recorded with the event")
    add_json(dropped)
    dropped.set_defaults(run=drop)


def list_parked(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        with tools.database.read() as session:
            rows = [
                {
                    "id": row.request_id,
                    "request_id": row.request_id,
                    "tenant_id": row.tenant_id,
                    "code": row.code,
                    "reason": row.reason,
                    "parked_at": row.parked_at.isoformat(),
                }
                for row in usage.parked(session)
            ]
        rows += [
            {
                "id": f"{each.file}:{each.seq}",
                "request_id": each.request_id,
                "tenant_id": "",
                "code": f"spool {each.topic}",
                "reason": each.reason,
                "parked_at": "",
            }
            for each in parked_records.parked_records(_spool(tools.settings))
        ]
    show(rows, as_json=arguments.json, title="parked events")
    return 0


def _release(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        sink = SqlUsageSink(tools.database, tools.clock)
        released = parked_records.release(_spool(tools.settings), sink)
        with tools.database.transaction() as session:
            released += usage.release(session, tools.clock)
            released += rating.release_stored(session, tools.clock)
        released += release_parked(tools.database, sink, tools.clock)
        left = len(parked_records.parked_records(_spool(tools.settings)))
        with tools.database.read() as session:
            left += len(usage.parked(session))
    show({"released": released, "parked": left}, as_json=arguments.json)
    return 0


def drop(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        name, _, number = arguments.id.rpartition(":")
        if name and (number.isascii() and number.isdecimal()):
            found = parked_records.drop(_spool(tools.settings), name, int(number))
        else:
            with tools.database.transaction() as session:
                parked = select(ParkedEvent).where(ParkedEvent.request_id == arguments.id)
                found = session.scalar(parked) is not None
                usage.dismiss(session, arguments.id, arguments.by)
    if not found:
        raise NotFound(
            f"Nothing parked has the id {arguments.id}.",
            next_step="`tollhouse usage parked list` shows the ids.",
        )
    log.warning("%s dropped the parked record %s", arguments.by, arguments.id)
    show({"dropped": arguments.id}, as_json=arguments.json)
    return 0


def _spool(settings: Settings) -> Path:
    return settings.data_dir / "spool"


HELP = "show usage and cost by day; import events; handle parked events"
_GROUPS = ("model", "project_id", "key_id", "adapter")
_SHOWN = ("requests", "input_tokens", "cached_tokens", "output_tokens", "waived_tokens")


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    days = verbs.add_parser("show", help="show usage and cost by day")
    days.add_argument("--tenant", required=True)
    days.add_argument("--from", dest="start", metavar="DATE", help="first day, UTC")
    days.add_argument("--to", dest="end", metavar="DATE", help="day after the last, UTC")
    days.add_argument(
        "--by", default="model", help=f"group within a day: {', '.join(_GROUPS)} or label:<name>"
    )
    days.set_defaults(run=_show)
    import_verb = verbs.add_parser("import", help="import usage events from JSON Lines")
    import_verb.add_argument("file", help="one event per line; `-` is stdin")
    import_verb.set_defaults(run=_import)
    report_verb = verbs.add_parser(
        "report", help="store CloudEvents of usage that Tollhouse did not serve"
    )
    report_verb.add_argument("file", help="a JSON list, or one event per line; `-` is stdin")
    report_verb.set_defaults(run=_report)
    parked = verbs.add_parser(
        "parked", help="list, release or drop events that cannot be stored or rated"
    )
    _add_parked(parked)
    release = verbs.add_parser("release", help="retry the parked events")
    release.set_defaults(run=_release)
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
        erased = stored_data(tools).erase_end_user(scope, arguments.end_user)
    show(erased, as_json=arguments.json, title="erased")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        wait_until_shipped(tools.settings)
        rate_all(tools.database, tools.clock)
        if arguments.by.startswith(PREFIX):
            service_rollups.sum_all(tools.database, tools.clock)
            shown = _by_label(tools, arguments)
            show(shown, as_json=arguments.json, title="usage")
            return 0
        if arguments.by not in _GROUPS:
            raise BadRequest(
                f"--by is {arguments.by!r}.",
                next_step=f"Use {', '.join(_GROUPS)}, or label:<name>, such as label:team.",
            )
        group = getattr(DailyUsage, arguments.by)
        sums = _SHOWN
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


def _by_label(tools: CommandContext, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    now = tools.clock.now()
    end = parse_datetime(arguments.end) if arguments.end else now
    start = parse_datetime(arguments.start) if arguments.start else end - timedelta(days=31)
    query = BucketQuery(start, end, Width.DAY, (arguments.by, "currency"), Width.DAY.most)
    with tools.database.read() as session:
        scope = scope_named(session, arguments.tenant)
        page = buckets_by_label(session, scope, query)
    return [
        {
            "day": f"{bucket.start:%Y-%m-%d}",
            arguments.by: row.group[arguments.by] or "-",
            **{name: row.counts[name] for name in _SHOWN},
            "amount": decimal_of(row.amounts["amount"]),
            "currency": row.group["currency"],
        }
        for bucket in page.buckets
        for row in bucket.rows
    ]


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
