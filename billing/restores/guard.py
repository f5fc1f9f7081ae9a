"""Whether the database is behind the world outside. While it is, nothing is collected and no number is
given: both would be done twice. Serving, metering and rating go on.
"""

import logging

from sqlalchemy.orm import Session

from billing.models import Recovery
from billing.restores import marks, places
from core.clock import Clock
from core.database import Database
from core.errors import Conflict
from core.queue import TaskContext
from core.settings import Settings

log = logging.getLogger("tollhouse.restores")
NEXT_STEP = "Run `tollhouse recover` (see docs/operator.md, Restore)."


def check(
    database: Database, settings: Settings, clock: Clock, *, everywhere: bool = False
) -> Recovery | None:
    """Compare the database with the latest mark outside; returns the open recovery, if there is one.
    The shared place is read where this machine has no mark, or if `everywhere` is set."""
    outside = [places.local(settings)]
    found = marks.filed(outside)
    shared = places.shared(settings) if everywhere or not found else None
    if shared is not None:
        try:
            found += marks.filed([shared])
        except Exception as error:
            log.error("the marks in %s cannot be read: %s", settings.restore_store, error)
    with database.read() as session:
        known = marks.open_recovery(session)
        reasons = [each for mark in found if (each := marks.lost_since(session, mark))]
    if known is not None or not reasons:
        return known
    with database.transaction() as session:
        known = marks.open_recovery(session)
        if known is None:
            known = Recovery(found_at=clock.now(), reason=reasons[0], report={})
            session.add(known)
            session.flush()
            log.critical("the database was restored from a backup. %s %s", reasons[0], NEXT_STEP)
    return known


def is_behind(context: TaskContext) -> bool:
    return check(context.database, context.settings, context.clock) is not None


def require_current(session: Session) -> None:
    """Raise Conflict while the database is behind."""
    found = marks.open_recovery(session)
    if found is not None:
        raise Conflict(
            "The database was restored from a backup, so that numbers and payments of before are "
            f"unknown to it: nothing is numbered or collected. {found.reason}",
            next_step=NEXT_STEP,
            code="database_behind",
        )
