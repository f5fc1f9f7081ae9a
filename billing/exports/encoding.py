"""An export as chunks of a file, for commands, the API and schedules."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from billing.exports.focus.documents import Window
from billing.exports.focus.rows import rows_of as focus_rows_of
from billing.exports.focus.tables import FocusTable, choose
from billing.exports.formats import Column, Format, Row, encode
from billing.exports.subjects import SUBJECTS, Period, Subject
from core.errors import BadRequest
from core.extras import require
from core.tenants.scope import TenantScope

FOCUS = "focus"
NAMES = (*SUBJECTS, FOCUS)


@dataclass(frozen=True, slots=True)
class Export:
    """A subject, or a table of FOCUS."""

    what: str
    table: FocusTable | None = None

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.table.written if self.table is not None else _subject(self.what).columns

    @property
    def stem(self) -> str:
        """What names of its files begin with."""
        if self.table is None:
            return self.what
        return f"{self.what}-{self.table.version}-{self.table.dataset}"


def export_of(
    what: str, version: str = "", dataset: str = "", columns: Sequence[str] = ()
) -> Export:
    """BadRequest for an unknown name, and for a FOCUS version, dataset or column that does not exist."""
    check_name(what)
    if what == FOCUS:
        return Export(what, choose(version, dataset, columns))
    given = {"focus_version": version, "dataset": dataset, "columns": columns}
    for name, value in given.items():
        if value:
            raise BadRequest(
                f"{name} is of FOCUS exports; this one is of {what}.",
                next_step="Leave it out, or export focus.",
                param=name,
            )
    return Export(what)


def column_names(text: str) -> tuple[str, ...]:
    """Names that are separated by commas."""
    return tuple(each.strip() for each in text.split(",") if each.strip())


def rows_of(
    session: Session, export: Export, scope: TenantScope | None, period: Period
) -> Iterator[Row]:
    """Rows of one tenant, or of all tenants without a scope."""
    if export.table is not None:
        return focus_rows_of(session, export.table, scope, Window(period.start, period.end))
    return _subject(export.what).rows(session, scope, period)


def chunks_of(
    session: Session, export: Export, form: Format, scope: TenantScope | None, period: Period
) -> Iterator[bytes]:
    return encode(rows_of(session, export, scope, period), export.columns, form)


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
