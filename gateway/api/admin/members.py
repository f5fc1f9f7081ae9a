"""/admin/v1/members: the members of a tenant."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core.tenants import members, sign_on
from gateway.api.admin.access import AdminContext, RequirePermission
from gateway.api.admin.schemas import MemberChange, NewMember, NewPassword
from gateway.api.dependencies import SettingsDep

router = APIRouter(prefix="/admin/v1/members", tags=["members"])
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("members", "read"))]
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("members", "write"))]


@router.get("")
def list_members(ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = members.all_of(session, ctx.scope)
        return {"object": "list", "data": [members.describe(each) for each in rows]}


@router.post("", status_code=201)
def add_member(body: NewMember, ctx: WriteAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        member = members.add(session, ctx.scope, ctx.clock, **body.model_dump())
        return members.describe(member)


@router.patch("/{member_id}")
def change_member(member_id: str, body: MemberChange, ctx: WriteAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        changed = members.change(
            session, ctx.scope, ctx.clock, member_id, **body.model_dump(exclude_unset=True)
        )
        return members.describe(changed)


@router.put("/{member_id}/password")
def set_password(member_id: str, body: NewPassword, ctx: WriteAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        members.set_password(session, ctx.scope, ctx.clock, member_id, body.password)
        return members.describe(members.get(session, ctx.scope, member_id))


@router.post("/{member_id}/invitation", status_code=201)
def invite_member(member_id: str, ctx: WriteAccess, settings: SettingsDep) -> dict[str, Any]:
    """A link that connects the member with the single sign-on account that opens it, once."""
    with ctx.database.transaction() as session:
        made = sign_on.invite(session, ctx.scope, ctx.clock, member_id)
    base = settings.public_url.rstrip("/")
    return {
        "member_id": made.member_id,
        "url": base + made.path(),
        "expires_at": made.expires_at.isoformat(),
    }
