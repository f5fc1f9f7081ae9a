"""The border between the database and the store of moved days: closed days up to the last moved one are
the store's, all later usage is the database's, so that no row is read from both.

The database drops the rows of a moved day some time after the border has passed it. Whoever read the
border before still finds them.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, func, or_, select, text
from sqlalchemy.orm import Session

from billing.usage.raw_rows import RawArchive
from billing.usage.tables import MovedDay, UsageEventRow
from core.errors import DependencyDown

DAY = timedelta(days=1)
_LOCK = 7_011_993  # key of the advisory lock; any constant of its own


@dataclass(frozen=True, slots=True)
class Border:
    """The moved batches are those after `after_batch` up to `last_batch`."""

    first_day: datetime
    last_day: datetime
    after_batch: int
    last_batch: int
    store: str
    floor_id: str

    @property
    def until(self) -> datetime:
        """Usage that occurred later is not moved; clocks differ by some minutes at most."""
        return self.last_day + DAY + timedelta(hours=1)

    @property
    def whole_from(self) -> datetime:
        """The first day of which the database has every row."""
        return self.last_day + 2 * DAY


def border_of(session: Session) -> Border | None:
    """None if no day is moved."""
    moved = MovedDay.moved_at.is_not(None)
    row = session.execute(
        select(
            func.min(MovedDay.day),
            func.max(MovedDay.day),
            func.min(MovedDay.after_batch),
            func.max(MovedDay.last_batch),
            func.min(MovedDay.store),
            func.max(MovedDay.floor_id),
        ).where(moved)
    ).one()
    return Border(*row) if row[0] is not None else None


def archive_of(session: Session) -> RawArchive | None:
    found: RawArchive | None = session.info.get(RawArchive)
    return found


def not_moved(border: Border | None) -> list[ColumnElement[bool]]:
    """Conditions on usage events."""
    batch = UsageEventRow.batch_id
    if border is None:
        return []
    return [or_(batch > border.last_batch, batch <= border.after_batch)]


def readable(archive: RawArchive, border: Border) -> RawArchive:
    """DependencyDown if it is not the store that has the moved days."""
    if archive.identity() != border.store:
        raise DependencyDown(
            "TOLLHOUSE_EVENTS_URL names another ClickHouse database than the one to which"
            f" {border.first_day:%Y-%m-%d} to {border.last_day:%Y-%m-%d} were moved.",
            next_step="Name the database that has them, or restore it.",
        )
    return archive


def take_lock(session: Session) -> bool:
    """Of moving days and of erasing names, until the transaction ends; False if another has it."""
    return bool(session.scalar(text(f"select pg_try_advisory_xact_lock({_LOCK})")))
