"""Tables as data: columns, rows and totals. HTML and CSV are rendered from the same object, so they
always agree.
"""

import csv
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from starlette.responses import Response, StreamingResponse

from core.money import decimal_of, units_of_minor

# money: picounits, shown rounded; exact: picounits to the last digit; minor: minor units; badge: a state;
# acts: the forms of a row.
Kind = Literal[
    "text", "code", "whole", "figure", "money", "exact", "minor", "moment", "badge", "acts"
]
NUMBERS: tuple[Kind, ...] = ("whole", "figure", "money", "exact", "minor", "moment")
_SUMMED: tuple[Kind, ...] = ("whole", "money", "exact", "minor")
_MONEY: tuple[Kind, ...] = ("money", "exact", "minor")


@dataclass(frozen=True, slots=True)
class Column:
    key: str
    title: str
    kind: Kind = "text"
    about: str = ""  # definition of the column
    link: str = ""  # key of the row's value that holds the URL
    brief: bool = False  # shorten ids on the page; CSV has them in full

    @property
    def is_number(self) -> bool:
        return self.kind in NUMBERS


@dataclass(frozen=True, slots=True)
class Table:
    """A row with its own `currency` is shown in that currency; such a table has no totals."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Any]]
    currency: str = "USD"
    totals: bool = True
    empty: str = "Nothing yet."  # shown if there are no rows: what to do next
    sort: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # column -> (URL, aria-sort)
    # (path or #id of a form on the page, label) of the button below `empty`
    next_step: tuple[str, str] | None = None

    @property
    def total(self) -> dict[str, int]:
        """Exact sums of the number columns."""
        return {
            column.key: sum(row[column.key] for row in self.rows)
            for column in self.columns
            if column.kind in _SUMMED
        }

    @property
    def shown(self) -> list[Column]:
        """The columns without those of acts that no row has."""
        return [
            column
            for column in self.columns
            if column.kind != "acts" or any(row[column.key] for row in self.rows)
        ]

    @property
    def explained(self) -> list[Column]:
        return [column for column in self.columns if column.about]

    def currency_of(self, row: dict[str, Any]) -> str:
        return str(row.get("currency", self.currency))

    def csv(self, name: str) -> Response:
        """The rows as CSV, with exact amounts."""
        text = "".join(_lines(self.columns, self.rows, self.currency))
        return Response(text, media_type=_CSV, headers=_as_file(name))


def csv_stream(
    name: str, columns: Sequence[Column], rows: Iterable[dict[str, Any]], currency: str
) -> Response:
    """A table that is too long for memory: rows are written as they are read."""
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
    is_money = column.kind in _MONEY and currency
    return f"{column.title} ({currency})" if is_money else column.title


def _plain(column: Column, row: dict[str, Any], currency: str) -> str:
    value = row[column.key]
    if value is None:
        return ""
    if column.kind in _MONEY:
        currency = str(row.get("currency", currency))
        units = units_of_minor(value, currency) if column.kind == "minor" else value
        return decimal_of(units) + (f" {currency}" if "currency" in row else "")
    if isinstance(value, datetime):
        return value.isoformat()
    text = str(value)
    # Prevents CSV injection: a spreadsheet must not evaluate names as formulas.
    risky = column.kind in ("text", "code", "badge") and text.startswith(("=", "+", "-", "@"))
    return "'" + text if risky else text
