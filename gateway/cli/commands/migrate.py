"""`tollhouse migrate`: upgrades the database schema, or downgrades it to a revision."""

import argparse

from gateway.cli.context import command_context
from gateway.cli.output import add_json, show

HELP = "upgrade the database schema, or downgrade it to a revision"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", default="head", metavar="REVISION", help="default: head")
    parser.add_argument("--down", action="store_true", help="downgrade to the revision (or `base`)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from migrations.run import current, downgrade, upgrade

    with command_context() as tools:
        before = current(tools.database)
        if arguments.down:
            downgrade(tools.database, arguments.to)
        else:
            upgrade(tools.database, arguments.to)
        moved = {"before": before, "after": current(tools.database)}
    show(moved, as_json=arguments.json, title="schema")
    return 0
