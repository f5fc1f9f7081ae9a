"""/admin/v1/appeals and /admin/v1/suspensions: appeals of decisions, and keys that were suspended."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from sqlalchemy.orm import Session

from core.tenants import access
from core.tenants.access import Actor
from core.tenants.roles import Roles
from core.tenants.scope import TenantScope
from gateway.admin.access import AdminContext, OperatorContext, RequireOperator, RequirePermission
from gateway.admin.schemas import NewAppeal, Ruling
from gateway.serving.api.dependencies import RolesDep
from moderation import appeals, strikes

router = APIRouter(prefix="/admin/v1", tags=["moderation"])
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("moderation", "read"))]
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("moderation", "write"))]
ReviewAccess = Annotated[OperatorContext, Depends(RequireOperator("operations", "write"))]
Status = Annotated[str | None, Query(description="open, granted or denied; default: all.")]


@router.get("/appeals")
def list_appeals(ctx: ReadAccess, status: Status = None) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = appeals.appeals(session, ctx.scope, status)
        return {"object": "list", "data": [appeals.describe(each) for each in rows]}


@router.post("/appeals", status_code=201)
def open_appeal(body: NewAppeal, ctx: WriteAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        appeal = appeals.open_appeal(
            session, ctx.scope, ctx.clock, body.request_id, body.reason, body.direction
        )
        return appeals.describe(appeal)


@router.post("/appeals/{appeal_id}/ruling")
def rule_on_appeal(
    appeal_id: str, body: Ruling, ctx: ReviewAccess, roles: RolesDep
) -> dict[str, Any]:
    """Only the operator decides, so no tenant rules on its own case. Granting voids the strike."""
    with ctx.database.transaction() as session:
        scope = _reviewer(session, roles, ctx.actor, appeals.tenant_of(session, appeal_id))
        appeal = appeals.decide(
            session, scope, ctx.clock, appeal_id, grant=body.grant, answer=body.answer
        )
        return appeals.describe(appeal)


@router.get("/suspensions")
def list_suspensions(ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = strikes.suspensions(session, ctx.scope)
        return {"object": "list", "data": [strikes.describe(each) for each in rows]}


@router.delete("/suspensions/{key_id}")
def lift_suspension(key_id: str, ctx: ReviewAccess, roles: RolesDep) -> dict[str, Any]:
    """Lift the suspension. Earlier strikes no longer count."""
    with ctx.database.transaction() as session:
        scope = _reviewer(session, roles, ctx.actor, strikes.tenant_of(session, key_id))
        strikes.lift(session, scope, ctx.clock, key_id)
    return {"key_id": key_id, "suspended": False}


def _reviewer(session: Session, roles: Roles, actor: Actor, tenant_id: str) -> TenantScope:
    return access.authorise(session, roles, actor, tenant_id, "moderation", "write")
