"""Options of the commands that write an export."""

import argparse

from billing.exports.encoding import Export, column_names, export_of
from billing.exports.focus.tables import COST_AND_USAGE, DATASETS, DEFAULT_VERSION, VERSIONS


def add_focus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--focus-version",
        default="",
        metavar="VERSION",
        help=f"of focus: {', '.join(VERSIONS)}; default: {DEFAULT_VERSION}",
    )
    parser.add_argument(
        "--dataset",
        default="",
        help=f"of focus: {', '.join(DATASETS)}; default: {COST_AND_USAGE}",
    )
    parser.add_argument(
        "--columns", default="", metavar="A,B", help="of focus: only these columns, in this order"
    )


def export_named(arguments: argparse.Namespace) -> Export:
    columns = column_names(arguments.columns)
    return export_of(arguments.what, arguments.focus_version, arguments.dataset, columns)
