"""/admin/v1/roles: the casbin policy. Only the operator may read or change it."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core.tenants import permissions
from core.tenants.roles import ensure_policy
from gateway.api.admin.access import OperatorOnly, OperatorVisit
from gateway.schemas.admin import Permission

router = APIRouter(prefix="/admin/v1/roles", tags=["roles"])
Writes = Annotated[OperatorVisit, Depends(OperatorOnly("roles", "write"))]


@router.get("")
def list_roles(
    visit: Annotated[OperatorVisit, Depends(OperatorOnly("roles", "read"))],
) -> dict[str, Any]:
    with visit.services.database.transaction() as session:
        ensure_policy(session)
        return {"object": "list", "data": permissions.listed(session)}


@router.post("", status_code=201)
def grant(body: Permission, visit: Writes) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        permissions.grant(session, services.clock, visit.actor.id, body.role, body.obj, body.act)
    return body.model_dump()


@router.delete("")
def withdraw(visit: Writes, role: str, obj: str, act: str) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        permissions.withdraw(session, services.clock, visit.actor.id, role, obj, act)
    return {"role": role, "obj": obj, "act": act}
