"""Whether the database is behind the world outside. While it is, nothing is collected and no number is
given: both would be done twice. Serving, metering and rating go on.
"""

import logging
from datetime import datetime, timedelta

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from billing.invoicing.tables import ReservedNumber
from billing.payments.base import Window
from billing.payments.provider_snapshot import default_window
from billing.recovery import marks, places
from billing.restores import restores
from billing.restores.restores import NEXT_STEP
from billing.restores.tables import Recovery
from core.clock import Clock
from core.database import Database
from core.queue import TaskContext
from core.settings import Settings
from core.tenants.models import Tenant

log = logging.getLogger("tollhouse.restores")
BEFORE = timedelta(days=2)  # records at the provider from before the last mark are read, too
_FINAL_FOR = timedelta(days=30)  # in which an audit runs after the last lost invoice is final again
_INVOICES_FOLLOW = timedelta(days=60)  # an invoice that is not final by then is not waited for


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
        known = restores.open_recovery(session)
        reasons = [each for mark in found if (each := marks.lost_since(session, mark))]
    if known is not None or not reasons:
        return known
    with database.transaction() as session:
        known = restores.open_recovery(session)
        if known is None:
            known = Recovery(found_at=clock.now(), reason=reasons[0], report={})
            session.add(known)
            session.flush()
            log.critical("the database was restored from a backup. %s %s", reasons[0], NEXT_STEP)
    return known


def window(session: Session, now: datetime) -> Window:
    """Whose records of the provider an audit reads. After a restore it begins with what the database
    lost, until a month after the lost invoices are final again: their payments and the refunds of those
    are posted then, even if no audit runs for weeks."""
    usual = default_window(now)
    waits = (
        select(func.min(ReservedNumber.reserved_at))
        .join(Tenant, Tenant.id == ReservedNumber.tenant_id)
        .where(
            ReservedNumber.external_id.is_not(None),
            ReservedNumber.reserved_at > now - _INVOICES_FOLLOW,
            or_(ReservedNumber.used_at.is_(None), ReservedNumber.used_at > now - _FINAL_FOR),
        )
    )
    reserved = session.scalar(waits)
    if reserved is None:
        return usual
    reports = session.scalars(select(Recovery.report).where(Recovery.finished_at >= reserved))
    begins = [datetime.fromisoformat(each["since"]) for each in reports if each.get("since")]
    return Window(min([usual.since, *(each - BEFORE for each in begins)]), usual.until)


def is_behind(context: TaskContext) -> bool:
    return check(context.database, context.settings, context.clock) is not None
