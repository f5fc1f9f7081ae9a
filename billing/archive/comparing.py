"""Compares a moved day in its store with the sums that were frozen when it was closed."""

from sqlalchemy.orm import Session

from billing.archive import frozen_sums
from billing.usage.border import Border, archive_of, readable
from billing.usage.raw_rows import RawArchive
from billing.usage.tables import ClosedDay
from core.errors import DependencyDown


def store_differences(session: Session, archive: RawArchive, day: ClosedDay) -> list[str]:
    """How the rows and the hourly sums of the store differ from the frozen sums."""
    found = []
    frozen = {name: int(value) for name, value in day.sums.items()}
    theirs = archive.sums(day.day)
    if theirs != frozen:
        found.append(f"the store's rows sum to {theirs}, the day was closed with {frozen}")
    groups = sorted(frozen_sums.stored_groups(session, day.day).charges)
    if sorted(archive.groups(day.day)) != groups:
        found.append("the store's charges differ from the frozen groups")
    if sorted(archive.hour_groups(day.day)) != groups:
        found.append("the store's hourly sums differ from the frozen groups")
    return found


def moved_differences(session: Session, border: Border, day: ClosedDay) -> list[str]:
    """For the audit: a store that cannot be read is a difference too."""
    archive = archive_of(session)
    if archive is None:
        return ["its rows are on ClickHouse, but TOLLHOUSE_EVENTS_URL is not set"]
    try:
        return store_differences(session, readable(archive, border), day)
    except DependencyDown as error:
        return [f"its rows cannot be compared: {error.message}"]
