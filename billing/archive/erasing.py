"""Erases the names of end users from moved days."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.usage.border import archive_of, take_lock
from billing.usage.tables import MovedDay
from core.errors import Conflict, DependencyDown


def erase_moved(session: Session, tenant_id: str, end_user: str | None) -> int:
    """Returns how many moved events had the name; None stands for all that the tenant's have, and for
    the ids of clients and members and all labels. Raises DependencyDown if their store does not answer,
    and Conflict while a day is being moved, which would take the name along."""
    archive = archive_of(session)
    if archive is not None and not take_lock(session):
        raise Conflict(
            "A day of usage is being moved to ClickHouse.",
            next_step="Nothing was erased. Try again in some minutes.",
        )
    store = session.scalar(select(MovedDay.store).limit(1))
    if store is None:
        return 0
    if archive is None or archive.identity() != store:
        raise DependencyDown(
            "Days were moved to a ClickHouse database that TOLLHOUSE_EVENTS_URL does not name.",
            next_step="Nothing was erased. Name that database and try again.",
        )
    return archive.erase(tenant_id, end_user)
