"""The restore that was noticed: while one is open, nothing is numbered or collected."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.restores import restores
from billing.restores.tables import Recovery
from core.errors import Conflict


def open_recovery(session: Session) -> Recovery | None:
    """The restore that was noticed and is not recovered from."""
    query = select(Recovery).where(Recovery.finished_at.is_(None)).order_by(Recovery.id).limit(1)
    return session.scalar(query)


NEXT_STEP = "Run `tollhouse recover` (see docs/operator.md, Restore)."


def require_current(session: Session) -> None:
    """Raise Conflict while the database is behind."""
    found = restores.open_recovery(session)
    if found is not None:
        raise Conflict(
            "The database was restored from a backup, so that numbers and payments of before are "
            f"unknown to it: nothing is numbered or collected. {found.reason}",
            next_step=NEXT_STEP,
            code="database_behind",
        )
