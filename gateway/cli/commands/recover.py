"""`tollhouse recover`: stores usage that the database lost and the engines' receipt files still hold."""

import argparse

from core.errors import BadRequest, Conflict
from gateway.cli.context import command_context
from gateway.cli.output import add_json, say, show
from gateway.metering.receipt_files import MIN_AGE_S, receipt_files, recover
from gateway.metering.streams.watch import stream_state

HELP = "store usage that a restored database lacks, from the engines' receipt files"
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
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    """Exit 1 if something could not be stored."""
    if arguments.from_receipts is None:
        raise BadRequest(
            "There is nothing to recover from.", next_step="Run tollhouse recover --from-receipts"
        )
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
    lists = {
        "recovered": found.stored,
        "parked": found.parked,
        "unknown_tenant": found.unknown_tenant,
        "without_payer": found.without_payer,
    }
    counts = {
        "files": len(files),
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
