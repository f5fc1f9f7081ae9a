"""Erases an end user's name from usage on request. Counts and amounts stay, so no sum changes.

Usage that gateways have not shipped yet still holds the name; an erasure is repeated once it is stored.
Files that exports wrote earlier are their owner's.
"""

from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from billing import guards
from billing.archive.erasing import erase_moved
from billing.usage import origin_rollups
from billing.usage.border import border_of, not_moved
from billing.usage.tables import ParkedEvent, UsageEventRow
from core.clock import Clock
from core.errors import BadRequest
from core.tenants import audit
from core.tenants.scope import TenantScope


@dataclass(frozen=True, slots=True)
class Erased:
    events: int
    parked: int

    def describe(self) -> dict[str, int]:
        return {"events": self.events, "parked": self.parked}


def erase_end_user(session: Session, scope: TenantScope, clock: Clock, end_user: str) -> Erased:
    """Remove the name from the tenant's usage; the audit log gets the counts, not the name."""
    if not end_user:
        raise BadRequest("end_user is empty.", next_step="Name the end user.", param="end_user")
    moved = erase_moved(session, scope.tenant_id, end_user)
    mine = UsageEventRow.tenant_id == scope.tenant_id
    named = select(UsageEventRow.request_id).where(mine, UsageEventRow.end_user == end_user)
    found = len(session.scalars(named.where(*not_moved(border_of(session)))).all())
    origin_rollups.forget(session, scope, end_user)  # before the events lose the name
    if session.scalar(named.limit(1)) is not None:
        with guards.open_for_update(session, UsageEventRow.__tablename__):
            session.execute(
                update(UsageEventRow)
                .where(mine, UsageEventRow.end_user == end_user)
                .values(end_user=None)
                .execution_options(synchronize_session=False)
            )
    parked = 0
    for row in session.scalars(select(ParkedEvent).where(ParkedEvent.tenant_id == scope.tenant_id)):
        if row.payload.get("end_user") == end_user:
            row.payload = {**row.payload, "end_user": None}
            parked += 1
    erased = Erased(found + moved, parked)
    audit.record(
        session,
        scope,
        clock,
        "end_user.erase",
        scope.tenant_id,
        before=None,
        after=erased.describe(),
    )
    return erased
