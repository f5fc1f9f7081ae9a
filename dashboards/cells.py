"""Table cells as HTML. Rendered in Python, because in Jinja they take most of the time of a page
with a hundred rows.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any

from markupsafe import Markup, escape

from core.money import decimal_of
from dashboards.formats import badge_class, exact, markup_code, minor, money, time_html
from dashboards.scales import grouped
from dashboards.tables import Column, Table

_NUMBER = '<td class="num">'
# Characters; a longer text may break anywhere, a shorter one does not.
_LONG, _BRIEF, _WRAPPED = ' class="long"', ' class="brief"', 18
_NOTHING = '<td class="num zero"'


def lines(table: Table, now: datetime) -> list[list[Markup | None]]:
    """The cells of each row; None where the template inserts the row's forms."""
    columns = table.shown
    return [
        [_cell(column, row, table.currency_of(row), now) for column in columns]
        for row in table.rows
    ]


def _cell(column: Column, row: dict[str, Any], currency: str, now: datetime) -> Markup | None:
    if column.kind == "acts":
        return None
    value = row[column.key]
    if value is None or value == "":
        return Markup(f"{_NUMBER}–</td>" if column.is_number else "<td>–</td>")
    if column.kind == "text" and column.link and row[column.link]:
        words, title = (_brief(value), value) if column.brief else (value, None)
        link = Markup('<td><a href="{}"{}>{}</a></td>')
        return link.format(
            row[column.link], Markup(' title="{}"').format(title) if title else "", words
        )
    if column.kind == "moment":
        return Markup(f"{_NUMBER}{time_html(value, now)}</td>")
    return Markup(_DRAWN[column.kind](value, currency))


def _brief(value: str) -> str:
    return value if len(value) <= 18 else f"{value[:4]}…{value[-6:]}"


def _money(value: Any, currency: str) -> str:
    said = escape(f"{decimal_of(value)} {currency}")
    return f'{_amount(value)} title="{said}">{escape(money(value, currency))}</td>'


def _amount(value: int) -> str:
    """Nothing is said in a soft colour, so that the amounts stand out."""
    return '<td class="num"' if value else _NOTHING


_DRAWN: dict[str, Callable[[Any, str], str]] = {
    "money": _money,
    "exact": lambda value, currency: (
        f"{_NUMBER}{escape(exact(value, currency))} {escape(currency)}</td>"
    ),
    "minor": lambda value, currency: f"{_amount(value)}>{escape(minor(value, currency))}</td>",
    "whole": lambda value, _: f"{_NUMBER}{grouped(value)}</td>",
    "figure": lambda value, _: f"{_NUMBER}{escape(value)}</td>",
    "badge": lambda value, _: (
        f'<td><span class="badge {badge_class(value)}">{escape(value)}</span></td>'
    ),
    "code": lambda value, _: f"<td><code data-copy>{escape(value)}</code></td>",
    "text": lambda value, _: (
        f"<td{_LONG if len(str(value)) > _WRAPPED else _BRIEF}>{markup_code(value)}</td>"
    ),
}
