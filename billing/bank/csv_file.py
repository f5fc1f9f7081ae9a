"""Bank statements as CSV: a header, then a line for each booking.

The names of the columns are `FIELDS`; a bank's own names are mapped to them.
"""

import csv
import io
from collections.abc import Mapping
from datetime import UTC, date, datetime

from billing.bank.lines import MOST_LINES, StatementLine, checked, clipped, minor_of
from core.errors import BadRequest

NEEDED = ("id", "date", "amount", "currency")
FIELDS = (*NEEDED, "account", "payer", "payer_account", "reference", "text")
_DATES = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%Y%m%d")
_EXAMPLE = "id,date,amount,currency,payer,reference,text"
_MOST_FIELD = 20_000


def parse(text: str, columns: Mapping[str, str] | None = None) -> list[StatementLine]:
    """`columns` maps names of `FIELDS` to those of the file. BadRequest names the line that is wrong."""
    mapped = _mapped(columns or {})
    csv.field_size_limit(_MOST_FIELD)
    head = text.lstrip("\ufeff").partition("\n")[0]
    delimiter = max(",;\t", key=head.count)
    reader = csv.reader(
        io.StringIO(text.lstrip("\ufeff"), newline=""), delimiter=delimiter, strict=True
    )
    try:
        rows = [(reader.line_num, row) for row in reader if any(each.strip() for each in row)]
    except csv.Error as error:
        raise BadRequest(
            f"Line {reader.line_num} of the file is not CSV: {error}.",
            next_step="Export the statement again.",
        ) from None
    if not rows:
        raise BadRequest("The file is empty.", next_step=f"Begin it with the line {_EXAMPLE}.")
    if len(rows) > MOST_LINES + 1:
        raise BadRequest(
            f"The file has {len(rows) - 1} lines.",
            next_step=f"Import at most {MOST_LINES} at once.",
        )
    places = _places(rows[0][1], mapped)
    return [_line(number, row, places, len(rows[0][1])) for number, row in rows[1:]]


def _mapped(columns: Mapping[str, str]) -> dict[str, str]:
    for name in columns:
        if name not in FIELDS:
            raise BadRequest(
                f"There is no field {str(name)[:40]!r}.",
                next_step=f"Map one of {', '.join(FIELDS)}.",
                param="columns",
            )
    return {name: columns.get(name, name).strip().lower() for name in FIELDS}


def _places(header: list[str], mapped: dict[str, str]) -> dict[str, int]:
    """Field -> its place in a row."""
    names = [each.strip().lower() for each in header]
    missing = [mapped[name] for name in NEEDED if mapped[name] not in names]
    if missing:
        raise BadRequest(
            f"The file has no column {', '.join(missing)}; it has {', '.join(names)[:200]}.",
            next_step=f"Begin it with the line {_EXAMPLE}, or say which column is which.",
            param="columns",
        )
    return {name: names.index(mapped[name]) for name in FIELDS if mapped[name] in names}


def _line(number: int, row: list[str], places: dict[str, int], width: int) -> StatementLine:
    where = f"Line {number}"
    if len(row) != width:
        raise BadRequest(
            f"{where} has {len(row)} fields, and the header has {width}.",
            next_step="Export the statement again; the file may be cut off.",
        )
    given = {name: " ".join(row[place].split()) for name, place in places.items()}
    currency = given["currency"].upper()
    return checked(
        StatementLine(
            given.get("account", "").replace(" ", ""),
            given["id"],
            _day(given["date"], where),
            currency,
            minor_of(given["amount"], currency, where),
            given.get("payer", "")[:200],
            given.get("payer_account", "").replace(" ", ""),
            given.get("reference", ""),
            clipped(given.get("text", "")),
        ),
        where,
    )


def _day(written: str, where: str) -> date:
    for form in _DATES:
        try:
            return datetime.strptime(written, form).replace(tzinfo=UTC).date()
        except ValueError:
            continue
    raise BadRequest(f"{where} has the date {written[:20]!r}.", next_step="Write it as 2026-01-30.")
