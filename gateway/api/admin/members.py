"""/admin/v1/members: the members of a tenant."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core.tenants import members
from gateway.api.admin.access import Allowed, Visit
from gateway.schemas.admin import MemberChange, NewMember, NewPassword

router = APIRouter(prefix="/admin/v1/members", tags=["members"])
Reads = Annotated[Visit, Depends(Allowed("members", "read"))]
Writes = Annotated[Visit, Depends(Allowed("members", "write"))]


@router.get("")
def list_members(visit: Reads) -> dict[str, Any]:
    with visit.services.database.read() as session:
        found = members.all_of(session, visit.scope)
        return {"object": "list", "data": [members.describe(each) for each in found]}


@router.post("", status_code=201)
def add_member(body: NewMember, visit: Writes) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        made = members.add(session, visit.scope, services.clock, **body.model_dump())
        return members.describe(made)


@router.patch("/{member_id}")
def change_member(member_id: str, body: MemberChange, visit: Writes) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        changed = members.change(
            session, visit.scope, services.clock, member_id, **body.model_dump(exclude_unset=True)
        )
        return members.describe(changed)


@router.put("/{member_id}/password")
def set_password(member_id: str, body: NewPassword, visit: Writes) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        members.set_password(session, visit.scope, services.clock, member_id, body.password)
        return members.describe(members.get(session, visit.scope, member_id))
