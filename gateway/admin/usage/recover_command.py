"""`tollhouse recover`: brings back what a database lost that was restored from a backup: usage from the
engines' receipt files, numbers and payments from the payment provider and the marks outside."""

import argparse
from pathlib import Path
from typing import Any

from billing.payments.base import TryLater
from billing.recovery import guard
from billing.recovery.recovery import Recover
from core.errors import BadRequest, Conflict, DependencyDown
from gateway.admin.console import CommandContext, command_context
from gateway.admin.output import add_json, say, show
from gateway.admin.stored_data.command import stored_data
from gateway.metering.receipt_files import MIN_AGE_S, Recovered, receipt_files, recover
from gateway.metering.streams.storing import stream_state
from gateway.serving.payments import make_payments

HELP = "bring back what a restored database lacks, then collect and number invoices again"
_SHOWN = 20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from-receipts",
        nargs="*",
        metavar="PATH",
        help="receipt files or directories of them; without a path those of this machine's engines",
    )
    parser.add_argument(
        "--min-age",
        type=float,
        default=MIN_AGE_S,
        metavar="SECONDS",
        help="skip requests younger than this many seconds, which may still run (default: 600)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only show what would be stored")
    parser.add_argument(
        "--marks",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIRECTORY",
        help="the folders `restore` of the data directories of other machines",
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    """Exit 1 if something could not be stored."""
    if arguments.from_receipts is None:
        return _whole(arguments)
    with command_context() as tools:
        stream = stream_state(tools.settings, tools.clock)
        if stream.messages or stream.problem:
            raise Conflict(
                f"{stream.messages} messages of usage lie in the stream. {stream.problem}".strip(),
                next_step="Wait until a worker has stored them: what they hold is not lost.",
            )
        files = receipt_files(tools.settings, arguments.from_receipts)
        found = recover(
            tools.database,
            tools.settings,
            tools.clock,
            files,
            dry_run=arguments.dry_run,
            min_age_s=arguments.min_age,
        )
    return _show_usage(found, len(files), arguments)


def _whole(arguments: argparse.Namespace) -> int:
    """Usage first, so that the invoices that are made again have it."""
    missing = [each for each in arguments.marks if not each.is_dir()]
    if missing:
        raise BadRequest(
            f"{missing[0]} is not a directory.",
            next_step="Name the folder `restore` of the data directory of another machine.",
        )
    with command_context() as tools:
        settings, clock = tools.settings, tools.clock
        behind = guard.check(tools.database, settings, clock, everywhere=True)
        if arguments.dry_run or behind is None:
            says = behind.reason if behind is not None else ""
            shown = {"behind": behind is not None, "reason": says, "dry_run": arguments.dry_run}
            return _show_erasures(tools, shown, arguments)
        stream = stream_state(settings, clock)
        if stream.messages:
            raise Conflict(
                f"{stream.messages} messages of usage lie in the stream.",
                next_step="Wait until a worker has stored them: what they hold is not lost.",
            )
        files = receipt_files(settings)
        usage = recover(
            tools.database,
            settings,
            clock,
            files,
            dry_run=False,
            min_age_s=arguments.min_age,
        )
        try:
            report = Recover(
                tools.database,
                settings,
                clock,
                make_payments(settings),
                tuple(arguments.marks),
            ).run()
        except TryLater as error:
            raise DependencyDown(
                f"The payment provider does not answer: {error}.",
                next_step="Run tollhouse recover again. Nothing is collected until it has ended.",
            ) from error
        erased, unreadable = stored_data(tools).erase_again()
    found: dict[str, Any] = report.as_json() | {"usage": len(usage.stored), "erased": erased}
    found["problems"] = [*found["problems"], *(_UNREADABLE.format(each) for each in unreadable)]
    if arguments.json:
        show(found, as_json=True)
    else:
        _say_whole(found)
    return int(bool(found["problems"] or usage.parked or usage.unknown_tenant))


def _show_erasures(
    tools: CommandContext, shown: dict[str, Any], arguments: argparse.Namespace
) -> int:
    """Of a database that is not behind, or of a dry run: erasures that it lacks are done all the same,
    since a backup may have been restored before the next mark."""
    stored = stored_data(tools)
    if arguments.dry_run:
        with tools.database.read() as session:
            pending, unreadable = stored.journal.pending(session)
        shown["erased"] = [each.id for each in pending]
    else:
        shown["erased"], unreadable = stored.erase_again()
    shown["problems"] = [_UNREADABLE.format(each) for each in unreadable]
    show(shown, as_json=arguments.json)
    return int(bool(unreadable))


_UNREADABLE = (
    "erasure {} was noted under another TOLLHOUSE_ADMIN_TOKEN: restore it, and run this again"
)
_TITLES = {
    "usage": "requests brought back from receipt files",
    "invoices": "invoice numbers that the next invoice run gives to the same tenant and period again",
    "skipped": "invoice numbers that stay without an invoice",
    "credit_notes": "credit notes that are lost: issue them again, with new numbers",
    "customers": "customers of the payment provider, adopted",
    "top_ups": "top-ups, adopted from the payment provider",
    "posted": "payments, refunds and disputes posted from the payment provider",
    "reported": "counts of usage that the payment provider has already",
    "refused": "keys, members and operators that are refused again",
    "erased": "erasures that the backup lacks, done again",
    "lost_payments": "payments and credit that are lost: post them again",
    "lost_changes": "changes that are lost: make them again, or ask the customer to",
    "problems": "problems",
}


def _say_whole(found: dict[str, Any]) -> None:
    say(f"The database had everything until {found['since']}.")
    for name, title in _TITLES.items():
        value = found[name]
        if value:
            say(f"{value if isinstance(value, int) else len(value)} {title}")
        for line in value if isinstance(value, list) else ():
            say(f"  {line}")
    say("Invoices are numbered and payments collected again.")


def _show_usage(found: Recovered, files: int, arguments: argparse.Namespace) -> int:
    lists = {
        "recovered": found.stored,
        "parked": found.parked,
        "unknown_tenant": found.unknown_tenant,
        "without_payer": found.without_payer,
    }
    counts = {
        "files": files,
        "in_files": found.in_files,
        "known": found.known,
        "too_old": found.too_old,
    } | {name: len(ids) for name, ids in lists.items()}
    failed = bool(found.parked or found.unknown_tenant)
    if arguments.json:
        named = {f"{name}_ids": ids[:_SHOWN] for name, ids in lists.items()}
        show(counts | named | {"dry_run": arguments.dry_run}, as_json=True)
        return int(failed)
    show(counts, as_json=False, title="recovered" if not arguments.dry_run else "would recover")
    if found.parked:
        say("Parked events lack their price or tenant: see tollhouse usage parked list.")
    if found.unknown_tenant:
        say("Create the missing tenants' rows from a later backup, then run this again.")
    return int(failed)
