"""/admin/v1/members: the members of a tenant."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from sqlalchemy.orm import Session

from billing.notices import member_mails
from billing.notices.alert_targets import AlertTargets
from core.settings import Settings
from core.tenants import invitations, members, permissions, sign_on, sign_on_connections
from core.tenants.roles import ensure_policy
from core.tenants.sign_on_connections import ConnectionDraft
from gateway.admin.access import AdminContext, OperatorContext, RequireOperator, RequirePermission
from gateway.admin.schemas import (
    MemberChange,
    NewMember,
    NewPassword,
    Permission,
    SignOnBody,
    SignOnForce,
)
from gateway.edge.auth.sign_on_directory import check_issuer
from gateway.serving.api.dependencies import AlertTargetsDep, SettingsDep

router = APIRouter(prefix="/admin/v1/members", tags=["members"])
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("members", "read"))]
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("members", "write"))]


@router.get("")
def list_members(ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = members.all_of(session, ctx.scope)
        return {"object": "list", "data": [members.describe(each) for each in rows]}


@router.post("", status_code=201)
def add_member(
    body: NewMember, ctx: WriteAccess, request: Request, targets: AlertTargetsDep
) -> dict[str, Any]:
    """Without a password the member is invited: the answer has a link, which is also mailed where the
    deployment sends mail."""
    hashed = members.hash_for(ctx.database, body.email, body.password) if body.password else None
    fields = body.model_dump(exclude={"password"})
    with ctx.database.transaction() as session:
        member = members.add(session, ctx.scope, ctx.clock, password_hash=hashed, **fields)
        links = LinkSender(session, ctx, base_of(request), targets)
        invitation = None if body.password else links.invite(member.id)
        return members.describe(member) | ({"invitation": invitation} if invitation else {})


@router.patch("/{member_id}")
def change_member(member_id: str, body: MemberChange, ctx: WriteAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        changed = members.change(
            session, ctx.scope, ctx.clock, member_id, **body.model_dump(exclude_unset=True)
        )
        return members.describe(changed)


@router.put("/{member_id}/password")
def set_password(member_id: str, body: NewPassword, ctx: WriteAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        email = members.get(session, ctx.scope, member_id).email
    hashed = members.hash_for(ctx.database, email, body.password)
    with ctx.database.transaction() as session:
        members.set_password(session, ctx.scope, ctx.clock, member_id, hashed)
        return members.describe(members.get(session, ctx.scope, member_id))


@router.post("/{member_id}/invitation", status_code=201)
def invite_member(
    member_id: str, ctx: WriteAccess, request: Request, targets: AlertTargetsDep
) -> dict[str, Any]:
    """A new one-time link, by which the member sets a password or connects a single sign-on account.
    Earlier links end."""
    with ctx.database.transaction() as session:
        links = LinkSender(session, ctx, base_of(request), targets)
        return {"member_id": member_id} | links.invite(member_id)


@dataclass(frozen=True, slots=True)
class LinkSender:
    session: Session
    ctx: AdminContext
    base: str
    targets: AlertTargets

    def invite(self, member_id: str) -> dict[str, Any]:
        ctx = self.ctx
        made = invitations.invite(self.session, ctx.scope, ctx.clock, member_id)
        if self.targets.sends_mail:
            now = ctx.clock.now()
            member_mails.send_link(self.session, ctx.scope.tenant_id, made, self.base, now)
        return {
            "url": made.url(self.base),
            "expires_at": made.expires_at.isoformat(),
            "mailed": self.targets.sends_mail,
        }


def base_of(request: Request) -> str:
    settings: Settings = request.app.state.services.settings
    return settings.public_url or str(request.base_url)


role_router = APIRouter(prefix="/admin/v1/roles", tags=["roles"])
RoleAccess = Annotated[OperatorContext, Depends(RequireOperator("roles", "write"))]


@role_router.get("")
def list_roles(
    ctx: Annotated[OperatorContext, Depends(RequireOperator("roles", "read"))],
) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        ensure_policy(session)
        return {"object": "list", "data": permissions.list_rules(session)}


@role_router.post("", status_code=201)
def grant(body: Permission, ctx: RoleAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        permissions.grant(session, ctx.clock, ctx.actor.id, body.role, body.obj, body.act)
    return body.model_dump()


@role_router.delete("")
def withdraw(ctx: RoleAccess, role: str, obj: str, act: str) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        permissions.withdraw(session, ctx.clock, ctx.actor.id, role, obj, act)
    return {"role": role, "obj": obj, "act": act}


sign_on_router = APIRouter(prefix="/admin/v1/single-sign-on", tags=["members"])
OwnerAccess = Annotated[AdminContext, Depends(RequirePermission("tenant", "write"))]


@sign_on_router.get("")
def get_sign_on(ctx: ReadAccess) -> dict[str, Any]:
    """The organisation's own issuer, without its secret, and the domains that it speaks for."""
    with ctx.database.read() as session:
        found = sign_on_connections.of_tenant(session, ctx.scope.tenant_id)
        domains = [each.domain for each in sign_on.domains(session, ctx.scope)]
    shown = sign_on_connections.describe(found) if found is not None else {"issuer": None}
    return {"object": "single_sign_on", **shown, "domains": domains}


@sign_on_router.put("")
def set_sign_on(body: SignOnBody, ctx: OwnerAccess, settings: SettingsDep) -> dict[str, Any]:
    """Set the issuer and our client there. Another issuer or client has to be tested again, at
    `/dashboard/sso/start?tenant=…&test=true`, before it can be forced."""
    check_issuer(body.issuer, settings.webhook_networks)
    draft = ConnectionDraft(**body.model_dump())
    with ctx.database.transaction() as session:
        row = sign_on_connections.put(session, ctx.scope, ctx.clock, draft)
        return {"object": "single_sign_on", **sign_on_connections.describe(row)}


@sign_on_router.post("/force")
def force_sign_on(body: SignOnForce, ctx: OwnerAccess) -> dict[str, Any]:
    """With `forced`, members sign in at the issuer alone, but for the owner `break_glass`."""
    with ctx.database.transaction() as session:
        row = sign_on_connections.force(
            session, ctx.scope, ctx.clock, body.forced, body.break_glass
        )
        return {"object": "single_sign_on", **sign_on_connections.describe(row)}


@sign_on_router.delete("")
def remove_sign_on(ctx: OwnerAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        sign_on_connections.remove(session, ctx.scope, ctx.clock)
    return {"object": "single_sign_on", "issuer": None}
