"""Appeals: a tenant objects to a decision; a reviewer grants or denies, and strikes follow."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.errors import BadRequest, Conflict, NotFound
from core.ids import new_id
from core.tenants import audit
from core.tenants.scope import TenantScope
from moderation.models import Appeal, Decision
from moderation.strikes import void

MAX_REASON_LENGTH = 2_000
STATUSES = ("open", "granted", "denied")


def open_appeal(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    request_id: str,
    reason: str,
    direction: str = "input",
) -> Appeal:
    """File an appeal against a decision, with a reason. A decision has at most one appeal."""
    if not reason.strip() or len(reason) > MAX_REASON_LENGTH:
        raise BadRequest(f"reason must have 1 to {MAX_REASON_LENGTH} characters.", param="reason")
    _decision(session, scope, request_id, direction)
    known = session.scalars(
        select(Appeal).where(Appeal.request_id == request_id, Appeal.direction == direction)
    ).first()
    if known is not None:
        raise Conflict(f"Request {request_id} already has an appeal: {known.id}.")
    appeal = Appeal(
        id=new_id("appeal"),
        tenant_id=scope.tenant_id,
        request_id=request_id,
        direction=direction,
        reason=reason,
        status="open",
        opened_at=clock.now(),
        opened_by=scope.actor,
    )
    session.add(appeal)
    session.flush()
    return appeal


def decide(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    appeal_id: str,
    *,
    grant: bool,
    answer: str = "",
) -> Appeal:
    """Grant or deny an open appeal. A granted one voids the strike; it does not free a key."""
    appeal = session.get(Appeal, appeal_id)
    if appeal is None or appeal.tenant_id != scope.tenant_id:
        raise NotFound(f"No appeal {appeal_id}.", next_step="List the appeals.")
    if appeal.status != "open":
        raise Conflict(f"Appeal {appeal_id} is already {appeal.status}.")
    appeal.status = "granted" if grant else "denied"
    appeal.decided_at = clock.now()
    appeal.decided_by = scope.actor
    appeal.answer = answer[:MAX_REASON_LENGTH]
    if grant:
        void(session, appeal.request_id, clock)
    session.flush()
    audit.record(
        session,
        scope,
        clock,
        "appeal.decide",
        appeal_id,
        before=None,
        after={"status": appeal.status},
    )
    return appeal


def appeals(session: Session, scope: TenantScope, status: str | None = None) -> list[Appeal]:
    query = select(Appeal).where(Appeal.tenant_id == scope.tenant_id)
    if status is not None:
        if status not in STATUSES:
            raise BadRequest(
                f"Unknown status {status[:40]!r}; use one of {', '.join(STATUSES)}.", param="status"
            )
        query = query.where(Appeal.status == status)
    return list(session.scalars(query.order_by(Appeal.opened_at.desc())))


def tenant_of(session: Session, appeal_id: str) -> str:
    """The appeal's tenant, for a reviewer, who has no tenant of their own."""
    appeal = session.get(Appeal, appeal_id)
    if appeal is None:
        raise NotFound(f"No appeal {appeal_id}.", next_step="List the appeals.")
    return appeal.tenant_id


def describe(appeal: Appeal) -> dict[str, Any]:
    """The JSON form of an appeal in routes and commands."""
    return {
        "id": appeal.id,
        "request_id": appeal.request_id,
        "direction": appeal.direction,
        "reason": appeal.reason,
        "status": appeal.status,
        "opened_at": appeal.opened_at.isoformat(),
        "opened_by": appeal.opened_by,
        "decided_at": appeal.decided_at.isoformat() if appeal.decided_at else None,
        "decided_by": appeal.decided_by,
        "answer": appeal.answer,
    }


def _decision(session: Session, scope: TenantScope, request_id: str, direction: str) -> Decision:
    found = session.scalars(
        select(Decision).where(
            Decision.tenant_id == scope.tenant_id,
            Decision.request_id == request_id,
            Decision.direction == direction,
        )
    ).first()
    if found is None:
        raise NotFound(f"There is no {direction} decision on request {request_id}.")
    return found
