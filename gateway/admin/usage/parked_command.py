"""The verbs of `tollhouse usage parked`: events parked in the database and records parked in this
machine's spool files."""

import argparse
import logging
from pathlib import Path

from sqlalchemy import select

from billing.rating import rating
from billing.usage import usage
from billing.usage.tables import ParkedEvent
from core.errors import NotFound
from core.settings import Settings
from gateway.admin.console.context import command_context
from gateway.admin.console.output import add_json, show
from gateway.metering import parked_records
from gateway.metering.streams.storing import release_parked
from gateway.metering.usage_sink import SqlUsageSink

log = logging.getLogger("tollhouse.usage")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=list_parked)
    add_json(parser)
    verbs = parser.add_subparsers(metavar="verb")
    add_json(listed := verbs.add_parser("list", help="list parked events with the reason"))
    listed.set_defaults(run=list_parked)
    add_json(released := verbs.add_parser("release", help="retry every parked event"))
    released.set_defaults(run=release)
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


def release(arguments: argparse.Namespace) -> int:
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
