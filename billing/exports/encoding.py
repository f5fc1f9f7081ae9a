"""An export as chunks of a file, for commands, the API and schedules."""

from collections.abc import Iterator

from sqlalchemy.orm import Session

from billing.exports.focus import focus_rows
from billing.exports.focus_columns import COLUMNS as FOCUS_COLUMNS
from billing.exports.formats import Column, Format, Row, encode
from billing.exports.subjects import SUBJECTS, Period, Subject
from core.errors import BadRequest
from core.extras import require
from core.tenants.scope import TenantScope

NAMES = (*SUBJECTS, "focus")


def columns_of(what: str) -> tuple[Column, ...]:
    return FOCUS_COLUMNS if what == "focus" else _subject(what).columns


def rows_of(
    session: Session, what: str, scope: TenantScope | None, period: Period
) -> Iterator[Row]:
    """Rows of one tenant, or of all tenants without a scope."""
    if what == "focus":
        return focus_rows(session, scope, period)
    return _subject(what).rows(session, scope, period)


def chunks_of(
    session: Session, what: str, form: Format, scope: TenantScope | None, period: Period
) -> Iterator[bytes]:
    return encode(rows_of(session, what, scope, period), columns_of(what), form)


def format_of(name: str) -> Format:
    """BadRequest for an unknown name, MissingExtra for one whose package is not installed."""
    try:
        form = Format(name)
    except ValueError:
        raise BadRequest(
            f"format is {name!r}; it must be one of {', '.join(Format)}.", param="format"
        ) from None
    if form is Format.PARQUET:
        require("pyarrow", "parquet", "An export as Parquet")
    return form


def check_name(what: str) -> None:
    if what not in NAMES:
        raise BadRequest(f"what is {what!r}; it must be one of {', '.join(NAMES)}.", param="what")


def _subject(what: str) -> Subject:
    check_name(what)
    return SUBJECTS[what]
