"""`tollhouse payment`: imports bank statements, and assigns the lines that match nothing."""

import argparse
import sys
from pathlib import Path
from typing import Any

from billing.adjustments.money_acts import FourEyes
from billing.bank import csv_file, wires
from billing.bank.wires import Clerk
from billing.payments import dunning
from core.errors import BadRequest
from gateway.admin.adjustments.command import actor
from gateway.admin.console import CommandContext, command_context
from gateway.admin.output import add_json, say, show


def add_bank_lines(verbs: Any) -> None:
    load = verbs.add_parser("import", help="import a bank statement and book its wires")
    load.add_argument("file", help="camt.053 or CSV with a header; `-` is stdin")
    load.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="FIELD=NAME",
        help=f"the file's name of a column: {', '.join(csv_file.FIELDS)}",
    )
    load.set_defaults(run=_import)
    listing = verbs.add_parser("lines", help="list lines of bank statements, newest first")
    listing.add_argument("--status", choices=wires.STATES, default="")
    listing.set_defaults(run=_list)
    assign = verbs.add_parser("assign", help="book an unmatched line for an invoice or a tenant")
    assign.add_argument("target", help="invoice (id or number) or tenant (id or name)")
    assign.set_defaults(run=_assign)
    unassign = verbs.add_parser("unassign", help="undo what was booked for a line")
    unassign.set_defaults(run=_unassign)
    drop = verbs.add_parser("ignore", help="mark a line that pays no invoice as handled")
    drop.set_defaults(run=_dismiss)
    for each in (assign, unassign, drop):
        each.add_argument("--line", required=True, metavar="ID", help="the line's id")
    for each in (unassign, drop):
        each.add_argument("--reason", required=True)
    for each in (load, assign, unassign, drop):
        each.add_argument(
            "--token-file", type=Path, metavar="FILE", help="act as the operator of this token"
        )
    for each in (load, listing, assign, unassign, drop):
        add_json(each)


def _import(arguments: argparse.Namespace) -> int:
    columns = dict(_column(each) for each in arguments.column)
    lines = wires.parse(_content(arguments.file), columns)
    with command_context() as tools:
        clerk = _clerk(tools, arguments)
        with tools.database.transaction() as session:
            result = wires.import_lines(session, lines, clerk)
            rows = [wires.describe(session, wires.get(session, each)) for each in result.lines]
        dunning.settle(tools.database, tools.clock)
    _show(rows, arguments)
    say(
        f"{result.matched} matched, {result.unmatched} unmatched, {result.ignored} debits, "
        f"{result.known} imported before."
    )
    return 0


def _content(name: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise BadRequest(f"{name} cannot be read: {error}.") from None


def _column(given: str) -> tuple[str, str]:
    name, sign, column = given.partition("=")
    if not sign or not column:
        raise BadRequest(f"--column {given} has no name.", next_step="Write it as id=Booking-ID.")
    return name, column


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        found = wires.listed(session, arguments.status, limit=500)
        rows = [wires.describe(session, each) for each in found]
    _show(rows, arguments)
    return 0


def _assign(arguments: argparse.Namespace) -> int:
    return _change(
        arguments,
        lambda session, clerk: wires.assign(session, arguments.line, arguments.target, clerk),
    )


def _unassign(arguments: argparse.Namespace) -> int:
    return _change(
        arguments,
        lambda session, clerk: wires.unassign(session, arguments.line, clerk, arguments.reason),
    )


def _dismiss(arguments: argparse.Namespace) -> int:
    return _change(
        arguments,
        lambda session, clerk: wires.dismiss(
            session, arguments.line, clerk.actor, arguments.reason
        ),
    )


def _change(arguments: argparse.Namespace, act: Any) -> int:
    with command_context() as tools:
        clerk = _clerk(tools, arguments)
        with tools.database.transaction() as session:
            row = wires.describe(session, act(session, clerk))
        dunning.settle(tools.database, tools.clock)
    _show([row], arguments)
    return 0


def _clerk(tools: CommandContext, arguments: argparse.Namespace) -> Clerk:
    rule = FourEyes.of(tools.settings.four_eyes_above)
    return Clerk(tools.clock, actor(tools, arguments.token_file), rule)


def _show(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    if not arguments.json:
        names = ("id", "booked_on", "payer", "status", "note")
        rows = [
            {name: row[name] for name in names}
            | {"amount": f"{row['amount']['text']} {row['currency']}"}
            for row in rows
        ]
    show(rows, as_json=arguments.json, title="bank lines")
