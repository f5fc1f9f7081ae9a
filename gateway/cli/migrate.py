"""`tollhouse migrate`: upgrades the database schema, or downgrades it to a revision."""

import argparse
import sys

from sqlalchemy.engine import make_url

from billing.usage import partitions
from core.errors import BadRequest
from gateway.admin.console import command_context
from gateway.admin.output import add_json, say, show

HELP = "upgrade the database schema, or downgrade it to a revision"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", default="head", metavar="REVISION", help="default: head")
    parser.add_argument("--down", action="store_true", help="downgrade to the revision (or `base`)")
    parser.add_argument("--yes", action="store_true", help="downgrade without asking")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from migrations.run import current, downgrade, upgrade

    with command_context() as tools:
        before = current(tools.database)
        if arguments.down:
            if not arguments.yes:
                _confirm(tools.database.url, arguments.to)
            downgrade(tools.database, arguments.to)
        else:
            upgrade(tools.database, arguments.to)
            if arguments.to == "head":
                with tools.database.transaction() as session:
                    partitions.ensure_ahead(session, tools.clock.now())
        moved = {"before": before, "after": current(tools.database)}
    show(moved, as_json=arguments.json, title="schema")
    return 0


def _confirm(url: str, revision: str) -> None:
    """A downgrade drops tables and columns with their rows."""
    shown = make_url(url).render_as_string(hide_password=True)
    if sys.stdin.isatty():
        say(f"Downgrading {shown} to {revision} deletes data. Type the revision to go on:")
        if sys.stdin.readline().strip() == revision:
            return
    raise BadRequest(
        f"The downgrade of {shown} to {revision} deletes data and was not confirmed.",
        next_step="Make a backup, then add --yes.",
    )
