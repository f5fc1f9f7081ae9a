"""A table as data: columns, rows, totals. One object is shown as HTML and written as CSV, so the two
cannot differ.
"""

import csv
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from starlette.responses import Response, StreamingResponse

from core.money import decimal_of, units_of_minor

# money is picounits, minor whole minor units, badge a state in words, acts the forms of a row.
Kind = Literal["text", "code", "whole", "figure", "money", "minor", "moment", "badge", "acts"]
NUMBERS: tuple[Kind, ...] = ("whole", "figure", "money", "minor", "moment")


@dataclass(frozen=True, slots=True)
class Column:
    key: str
    title: str
    kind: Kind = "text"
    about: str = ""  # the definition behind the figure
    link: str = ""  # key of the row's value that is the address
    brief: bool = False  # an id is shown by its ends; the file has it whole

    @property
    def is_number(self) -> bool:
        return self.kind in NUMBERS


@dataclass(frozen=True, slots=True)
class Table:
    """A row with a `currency` of its own is shown in it; such a table has no totals."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Any]]
    currency: str = "USD"
    totals: bool = True
    empty: str = "Nothing yet."  # what to do next where there is no row

    @property
    def total(self) -> dict[str, int]:
        """Sums of the number columns; exact, since amounts are whole picounits."""
        return {
            column.key: sum(row[column.key] for row in self.rows)
            for column in self.columns
            if column.kind in ("whole", "money", "minor")
        }

    @property
    def explained(self) -> list[Column]:
        return [column for column in self.columns if column.about]

    def currency_of(self, row: dict[str, Any]) -> str:
        return str(row.get("currency", self.currency))

    def csv(self, name: str) -> Response:
        """The same rows; money exact and unrounded."""
        text = "".join(_lines(self.columns, self.rows, self.currency))
        return Response(text, media_type=_CSV, headers=_as_file(name))


def csv_stream(
    name: str, columns: Sequence[Column], rows: Iterable[dict[str, Any]], currency: str
) -> Response:
    """A table that is too long to be held: its rows are written as they come."""
    lines = _lines(columns, rows, currency)
    return StreamingResponse(lines, media_type=_CSV, headers=_as_file(name))


_CSV = "text/csv; charset=utf-8"


def _as_file(name: str) -> dict[str, str]:
    return {"content-disposition": f'attachment; filename="{name}.csv"'}


def _lines(
    columns: Sequence[Column], rows: Iterable[dict[str, Any]], currency: str
) -> Iterator[str]:
    shown = [column for column in columns if column.kind != "acts"]
    ahead = iter(rows)
    first = next(ahead, None)
    mixed = first is not None and "currency" in first
    yield _line([_heading(column, "" if mixed else currency) for column in shown])
    if first is None:
        return
    for row in itertools.chain([first], ahead):
        yield _line([_plain(column, row, currency) for column in shown])


def _line(cells: Sequence[str]) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\r\n").writerow(cells)
    return out.getvalue()


def _heading(column: Column, currency: str) -> str:
    is_money = column.kind in ("money", "minor") and currency
    return f"{column.title} ({currency})" if is_money else column.title


def _plain(column: Column, row: dict[str, Any], currency: str) -> str:
    value = row[column.key]
    if value is None:
        return ""
    if column.kind in ("money", "minor"):
        currency = str(row.get("currency", currency))
        units = units_of_minor(value, currency) if column.kind == "minor" else value
        return decimal_of(units) + (f" {currency}" if "currency" in row else "")
    if isinstance(value, datetime):
        return value.isoformat()
    text = str(value)
    # A spreadsheet must not run what a customer named.
    risky = column.kind in ("text", "code", "badge") and text.startswith(("=", "+", "-", "@"))
    return "'" + text if risky else text
