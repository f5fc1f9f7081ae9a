"""A table as data: columns, rows, totals. One object is shown as HTML and written as CSV, so the two
cannot differ.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.responses import Response

from core.money import decimal_of
from dashboards.scales import grouped

Kind = Literal["text", "whole", "money", "moment"]


@dataclass(frozen=True, slots=True)
class Column:
    key: str
    title: str
    kind: Kind = "text"
    about: str = ""  # the definition behind the figure


@dataclass(frozen=True, slots=True)
class Table:
    caption: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Any]]
    currency: str = "USD"
    totals: bool = True

    @property
    def total(self) -> dict[str, int]:
        """Sums of the number columns; exact, since amounts are whole picounits."""
        return {
            column.key: sum(row[column.key] for row in self.rows)
            for column in self.columns
            if column.kind in ("whole", "money")
        }

    def csv(self, name: str) -> Response:
        """The same rows and the same totals; money exact and unrounded."""
        out = io.StringIO(newline="")
        writer = csv.writer(out, lineterminator="\r\n")
        writer.writerow([self._heading(column) for column in self.columns])
        for row in self.rows:
            writer.writerow([_plain(column, row[column.key]) for column in self.columns])
        return Response(
            out.getvalue(),
            media_type="text/csv; charset=utf-8",
            headers={"content-disposition": f'attachment; filename="{name}.csv"'},
        )

    def _heading(self, column: Column) -> str:
        return f"{column.title} ({self.currency})" if column.kind == "money" else column.title


def _plain(column: Column, value: Any) -> str:
    if column.kind == "money":
        return decimal_of(value)
    if value is None:
        return ""
    text = str(value)
    # A spreadsheet must not run what a customer named.
    return "'" + text if column.kind == "text" and text.startswith(("=", "+", "-", "@")) else text


def shown(column: Column, value: Any) -> str:
    if value is None or value == "":
        return "–"
    return grouped(value) if column.kind == "whole" else str(value)
