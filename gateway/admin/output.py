"""Output of commands: JSON or a table on stdout, messages on stderr. Imports no database."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def show(value: Any, *, as_json: bool, title: str = "") -> None:
    """Prints a mapping as name and value, a list of mappings as a table, anything else as is."""
    if as_json:
        sys.stdout.write(json.dumps(value, default=str, ensure_ascii=False) + "\n")
    elif isinstance(value, Mapping):
        _table(["", title], [[str(k), _cell(v)] for k, v in value.items()], header=bool(title))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        _rows(list(value), title)
    else:
        sys.stdout.write(f"{value}\n")


def say(line: str) -> None:
    """Print a message to stderr."""
    sys.stderr.write(line + "\n")


def _rows(rows: list[Any], title: str) -> None:
    if not rows:
        say(f"No {title}." if title else "Nothing to show.")
        return
    columns = list(rows[0])
    _table(columns, [[_cell(row.get(name)) for name in columns] for row in rows], header=True)


def _table(columns: list[str], rows: list[list[str]], *, header: bool) -> None:
    table = Table(box=None, pad_edge=False, show_header=header, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Without a terminal the table is as wide as needed, so that each row stays on one line.
    width = None if sys.stdout.isatty() else 10_000
    Console(width=width, highlight=False, soft_wrap=not sys.stdout.isatty()).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, default=str, ensure_ascii=False)
    return str(value)
