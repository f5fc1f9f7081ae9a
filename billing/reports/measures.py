"""Figures for alerts that every process which serves /metrics reads from the database.

A task runs in any one worker, so a gauge that it sets is stale in the others; these are read again at
each scrape.
"""

import logging
import threading
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from billing.audit.tables import AuditRun
from billing.closing import moving
from billing.exports import schedules
from billing.restores import restores
from billing.usage.border import archive_of, border_of, readable
from billing.usage.tables import ParkedEvent, UsageBatch
from core import metrics
from core.clock import Clock
from core.database import Database
from core.dead_letter_models import DeadLetter
from core.errors import DependencyDown

log = logging.getLogger("tollhouse.billing")
_one_at_a_time = threading.Lock()
_GAUGES = {
    "tollhouse_unrated_age_seconds": metrics.unrated_age_seconds,
    "tollhouse_audit_age_seconds": metrics.audit_age_seconds,
    "tollhouse_database_behind": metrics.database_behind,
    "tollhouse_audit_differences": metrics.audit_differences,
    "tollhouse_clickhouse_down": metrics.clickhouse_down,
    "tollhouse_unmoved_age_seconds": metrics.unmoved_age_seconds,
    "tollhouse_parked_events": metrics.parked_events,
    "tollhouse_parked_exports": metrics.parked_exports,
    "tollhouse_dead_letters_waiting": metrics.dead_letters_waiting,
}


def refresh(database: Database, clock: Clock, events_days: int) -> None:
    """Set the gauges. If the database does not answer, they keep their values. `events_days`: whole
    days of raw events that stay in the database where others are moved."""
    with _one_at_a_time:
        try:
            with database.read() as session:
                found = read(session, clock.now(), events_days)
        except SQLAlchemyError as error:
            log.warning("cannot read the billing metrics: %s", error)
            metrics.database_up.set(0)
            return
        for name, value in found.items():
            _GAUGES[name].set(value)
        metrics.database_up.set(1)


def read(session: Session, now: datetime, events_days: int) -> dict[str, float]:
    """The figures by the name of their metric."""
    archive = archive_of(session)
    unmoved = moving.unmoved(session, now, events_days) if archive is not None else moving.Unmoved()
    oldest = select(UsageBatch.recorded_at).order_by(UsageBatch.id).limit(1)
    unrated = session.scalar(oldest.where(UsageBatch.rated_at.is_(None)))
    run = session.execute(
        select(AuditRun.at, AuditRun.report).order_by(AuditRun.at.desc()).limit(1)
    ).one_or_none()
    waiting = (ParkedEvent.released_at.is_(None), ParkedEvent.dismissed_by.is_(None))
    parked = session.scalar(select(func.count()).select_from(ParkedEvent).where(*waiting))
    dead = select(func.count()).select_from(DeadLetter).where(DeadLetter.replayed_at.is_(None))
    return {
        "tollhouse_unrated_age_seconds": _age(unrated, now),
        "tollhouse_audit_age_seconds": _age(run[0] if run else session.scalar(oldest), now),
        "tollhouse_database_behind": float(restores.open_recovery(session) is not None),
        "tollhouse_audit_differences": len(run[1].get("differences", ())) if run else 0,
        "tollhouse_clickhouse_down": float(_clickhouse_is_down(session)),
        "tollhouse_unmoved_age_seconds": unmoved.age_s,
        "tollhouse_parked_events": parked or 0,
        "tollhouse_parked_exports": schedules.parked(session),
        "tollhouse_dead_letters_waiting": session.scalar(dead) or 0,
    }


def _clickhouse_is_down(session: Session) -> bool:
    """False where no day is moved and none is to be."""
    archive, border = archive_of(session), border_of(session)
    if archive is None:
        return border is not None
    try:
        archive.ping()
        if border is not None:
            readable(archive, border)
    except DependencyDown as error:
        log.warning("moved days cannot be read: %s", error.message)
        return True
    return False


def _age(since: datetime | None, now: datetime) -> float:
    return max(0.0, (now - since).total_seconds()) if since is not None else 0.0
