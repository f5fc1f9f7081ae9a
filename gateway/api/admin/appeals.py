"""/admin/v1/appeals and /admin/v1/suspensions: appeals of decisions, and keys that were suspended."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from sqlalchemy.orm import Session

from core.tenants import access
from core.tenants.scope import TenantScope
from gateway.api.admin.access import Allowed, OperatorOnly, OperatorVisit, Visit
from gateway.schemas.admin import NewAppeal, Ruling
from moderation import appeals, strikes

router = APIRouter(prefix="/admin/v1", tags=["moderation"])
Reads = Annotated[Visit, Depends(Allowed("moderation", "read"))]
Writes = Annotated[Visit, Depends(Allowed("moderation", "write"))]
Reviews = Annotated[OperatorVisit, Depends(OperatorOnly("operations", "write"))]
Status = Annotated[str | None, Query(description="open, granted or denied; default: all.")]


@router.get("/appeals")
def list_appeals(visit: Reads, status: Status = None) -> dict[str, Any]:
    with visit.services.database.read() as session:
        found = appeals.appeals(session, visit.scope, status)
        return {"object": "list", "data": [appeals.describe(each) for each in found]}


@router.post("/appeals", status_code=201)
def open_appeal(body: NewAppeal, visit: Writes) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        made = appeals.open_appeal(
            session, visit.scope, services.clock, body.request_id, body.reason, body.direction
        )
        return appeals.describe(made)


@router.post("/appeals/{appeal_id}/ruling")
def rule_on_appeal(appeal_id: str, body: Ruling, visit: Reviews) -> dict[str, Any]:
    """Only the operator decides, so no tenant rules on its own case. Granting voids the strike."""
    services = visit.services
    with services.database.transaction() as session:
        scope = _reviewer(session, visit, appeals.tenant_of(session, appeal_id))
        made = appeals.decide(
            session, scope, services.clock, appeal_id, grant=body.grant, answer=body.answer
        )
        return appeals.describe(made)


@router.get("/suspensions")
def list_suspensions(visit: Reads) -> dict[str, Any]:
    with visit.services.database.read() as session:
        found = strikes.suspensions(session, visit.scope)
        return {"object": "list", "data": [strikes.describe(each) for each in found]}


@router.delete("/suspensions/{key_id}")
def lift_suspension(key_id: str, visit: Reviews) -> dict[str, Any]:
    """Lift the suspension. Earlier strikes no longer count."""
    services = visit.services
    with services.database.transaction() as session:
        scope = _reviewer(session, visit, strikes.tenant_of(session, key_id))
        strikes.lift(session, scope, services.clock, key_id)
    return {"key_id": key_id, "suspended": False}


def _reviewer(session: Session, visit: OperatorVisit, tenant_id: str) -> TenantScope:
    roles = visit.services.roles
    return access.authorise(session, roles, visit.actor, tenant_id, "moderation", "write")
