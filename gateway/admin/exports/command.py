"""`tollhouse export`: writes usage, charges, invoices, ledger or FOCUS, now or on a schedule."""

import argparse
import hashlib
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from sqlalchemy.orm import Session

from billing.exports.encoding import FOCUS, NAMES, chunks_of, export_of, format_of
from billing.exports.focus.tables import DATASETS, VERSIONS, table_of
from billing.exports.formats import Format
from billing.exports.subjects import Period
from billing.rating.rating_worker import rate_all
from core.errors import BadRequest
from core.tenants.scope import scope_of_operator
from gateway.admin.console.context import command_context
from gateway.admin.console.output import add_json, say, show
from gateway.admin.console.tenants import tenant_id_of
from gateway.admin.exports.options import add_focus, export_named
from gateway.admin.exports.schedules_command import add_export_schedules
from gateway.admin.ledger.journal_command import add_journal
from gateway.edge.datetimes import parse_datetime
from gateway.metering.spool_watch import wait_until_shipped

HELP = "write usage, charges, invoices, the ledger or FOCUS, now or on a schedule"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    kinds = verbs.add_parser("list", help="list the exports and their columns")
    kinds.set_defaults(run=_list)
    write = verbs.add_parser("run", help="write one export")
    write.add_argument("what", choices=NAMES)
    write.add_argument("--tenant", help="name or id; default: all tenants")
    add_focus(write)
    write.add_argument("--format", choices=list(Format), default="csv")
    write.add_argument("--from", dest="start", metavar="DATE", help="first day, UTC")
    write.add_argument("--to", dest="end", metavar="DATE", help="day after the last, UTC")
    write.add_argument("--output", metavar="FILE", help="default, and `-`: stdout")
    write.set_defaults(run=_run)
    add_export_schedules(verbs)
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
    export_named(arguments)  # refuses a wrong choice before anything is read
    with command_context() as tools:
        wait_until_shipped(tools.settings)
        rate_all(tools.database, tools.clock)
        period = _period(tools.clock.now(), arguments.start, arguments.end)
        with tools.database.report(fresh=True) as session:
            chunks = _chunks(session, arguments, period)
            if arguments.output in (None, "-"):
                for chunk in chunks:
                    sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
                return 0
            written = _write(Path(arguments.output), chunks)
    show(written, as_json=arguments.json, title="export")
    return 0


def _chunks(session: Session, arguments: argparse.Namespace, period: Period) -> Iterator[bytes]:
    tenant = arguments.tenant
    scope = scope_of_operator(tenant_id_of(session, tenant), "command line") if tenant else None
    return chunks_of(session, export_named(arguments), format_of(arguments.format), scope, period)


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


def _period(now: datetime, start: str | None, end: str | None) -> Period:
    until = parse_datetime(end) if end else now
    since = parse_datetime(start) if start else until - timedelta(days=31)
    if since >= until:
        raise BadRequest("--from is not before --to.", next_step="Give an earlier --from.")
    return Period(since, until)
