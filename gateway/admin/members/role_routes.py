"""/admin/v1/roles: the casbin policy. Only the operator may read or change it."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core.tenants import permissions
from core.tenants.roles import ensure_policy
from gateway.admin.access import OperatorContext, RequireOperator
from gateway.admin.schemas import Permission

router = APIRouter(prefix="/admin/v1/roles", tags=["roles"])
WriteAccess = Annotated[OperatorContext, Depends(RequireOperator("roles", "write"))]


@router.get("")
def list_roles(
    ctx: Annotated[OperatorContext, Depends(RequireOperator("roles", "read"))],
) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        ensure_policy(session)
        return {"object": "list", "data": permissions.list_rules(session)}


@router.post("", status_code=201)
def grant(body: Permission, ctx: WriteAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        permissions.grant(session, ctx.clock, ctx.actor.id, body.role, body.obj, body.act)
    return body.model_dump()


@router.delete("")
def withdraw(ctx: WriteAccess, role: str, obj: str, act: str) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        permissions.withdraw(session, ctx.clock, ctx.actor.id, role, obj, act)
    return {"role": role, "obj": obj, "act": act}
