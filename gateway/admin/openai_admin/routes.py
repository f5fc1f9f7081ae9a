"""/v1/organization: projects, users, invites and keys in the format of OpenAI's administration API."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from sqlalchemy.orm import Session

from core.errors import BadRequest, Conflict, NotFound
from core.tenants import keys, members, organisations
from core.tenants.models import ApiKey, Member, Project
from gateway.admin.access import AdminContext, RequirePermission
from gateway.admin.members.routes import LinkSender, base_of
from gateway.admin.openai_admin import shapes
from gateway.serving.api.dependencies import AlertTargetsDep

router = APIRouter(prefix="/v1/organization", tags=["organization"])
ReadProjects = Annotated[AdminContext, Depends(RequirePermission("projects", "read"))]
WriteProjects = Annotated[AdminContext, Depends(RequirePermission("projects", "write"))]
ReadMembers = Annotated[AdminContext, Depends(RequirePermission("members", "read"))]
WriteMembers = Annotated[AdminContext, Depends(RequirePermission("members", "write"))]
ReadKeys = Annotated[AdminContext, Depends(RequirePermission("keys", "read"))]
WriteKeys = Annotated[AdminContext, Depends(RequirePermission("keys", "write"))]
Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(max_length=40, description="The last_id of the page before.")]
_ADMIN_ROLES = ("owner", "admin")


@router.get("/projects")
def list_projects(
    ctx: ReadProjects, *, limit: Limit = 20, after: After = None, include_archived: bool = False
) -> dict[str, Any]:
    with ctx.database.read() as session:
        found = organisations.projects(session, ctx.scope)
    rows = [each for each in found if include_archived or each.archived_at is None]
    return shapes.page(rows, after, limit, shapes.project)


@router.post("/projects")
def create_project(body: shapes.ProjectBody, ctx: WriteProjects) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        made = organisations.create_project(session, ctx.scope, ctx.clock, name=body.name)
        return shapes.project(made)


@router.get("/projects/{project_id}")
def get_project(project_id: str, ctx: ReadProjects) -> dict[str, Any]:
    with ctx.database.read() as session:
        return shapes.project(_project(session, ctx, project_id))


@router.post("/projects/{project_id}")
def change_project(project_id: str, body: shapes.ProjectBody, ctx: WriteProjects) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        changed = organisations.rename_project(session, ctx.scope, ctx.clock, project_id, body.name)
        return shapes.project(changed)


@router.post("/projects/{project_id}/archive")
def archive_project(project_id: str, ctx: WriteProjects) -> dict[str, Any]:
    """Its keys stop working."""
    with ctx.database.transaction() as session:
        return shapes.project(
            organisations.archive_project(session, ctx.scope, ctx.clock, project_id)
        )


@router.get("/projects/{project_id}/api_keys")
def list_project_keys(
    project_id: str, ctx: ReadKeys, *, limit: Limit = 20, after: After = None
) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = _live(session, ctx, project_id)
        owners = _owners(session, ctx)
    return shapes.page(
        rows, after, limit, lambda key: shapes.project_key(key, owners.get(key.member_id))
    )


@router.get("/projects/{project_id}/api_keys/{key_id}")
def get_project_key(project_id: str, key_id: str, ctx: ReadKeys) -> dict[str, Any]:
    with ctx.database.read() as session:
        key = _one(_live(session, ctx, project_id), key_id)
        return shapes.project_key(key, _owners(session, ctx).get(key.member_id))


@router.delete("/projects/{project_id}/api_keys/{key_id}")
def revoke_project_key(project_id: str, key_id: str, ctx: WriteKeys) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        keys.revoke(session, ctx.scope, ctx.clock, _one(_live(session, ctx, project_id), key_id).id)
    return _deleted("organization.project.api_key", key_id)


@router.get("/projects/{project_id}/service_accounts")
def list_service_accounts(
    project_id: str, ctx: ReadKeys, *, limit: Limit = 20, after: After = None
) -> dict[str, Any]:
    with ctx.database.read() as session:
        return shapes.page(
            _accounts(session, ctx, project_id), after, limit, shapes.service_account
        )


@router.post("/projects/{project_id}/service_accounts")
def create_service_account(
    project_id: str, body: shapes.ServiceAccountBody, ctx: WriteKeys
) -> dict[str, Any]:
    """A key of the role developer for a program. It works on without the member who made it; the
    secret is in this answer only."""
    with ctx.database.transaction() as session:
        issued = keys.issue(
            session,
            ctx.scope,
            ctx.clock,
            project_id=project_id,
            name=body.name,
            service_account=True,
        )
        key = keys.get(session, ctx.scope, issued.id)
        secret = {
            "object": "organization.project.service_account.api_key",
            "value": issued.secret,
            "name": key.name,
            "created_at": shapes.seconds(key.created_at),
            "id": key.id,
        }
        return shapes.service_account(key) | {"api_key": secret}


@router.get("/projects/{project_id}/service_accounts/{account_id}")
def get_service_account(project_id: str, account_id: str, ctx: ReadKeys) -> dict[str, Any]:
    with ctx.database.read() as session:
        return shapes.service_account(_one(_accounts(session, ctx, project_id), account_id))


@router.delete("/projects/{project_id}/service_accounts/{account_id}")
def delete_service_account(project_id: str, account_id: str, ctx: WriteKeys) -> dict[str, Any]:
    """Its key stops working."""
    with ctx.database.transaction() as session:
        keys.revoke(
            session, ctx.scope, ctx.clock, _one(_accounts(session, ctx, project_id), account_id).id
        )
    return _deleted("organization.project.service_account", account_id)


@router.get("/users")
def list_users(
    ctx: ReadMembers,
    *,
    limit: Limit = 20,
    after: After = None,
    emails: Annotated[list[str] | None, Query(max_length=100)] = None,
    emails_of_sdk: Annotated[list[str] | None, Query(alias="emails[]", max_length=100)] = None,
) -> dict[str, Any]:
    """Members who can sign in. Those who are invited are among the invites until then."""
    wanted = {each.strip().lower() for each in (*(emails or ()), *(emails_of_sdk or ()))}
    with ctx.database.read() as session:
        rows = [
            each for each in _members(session, ctx, "active") if not wanted or each.email in wanted
        ]
    return shapes.page(rows, after, limit, shapes.user)


@router.get("/users/{user_id}")
def get_user(user_id: str, ctx: ReadMembers) -> dict[str, Any]:
    with ctx.database.read() as session:
        return shapes.user(_one(_members(session, ctx, "active"), user_id))


@router.post("/users/{user_id}")
def change_user(user_id: str, body: shapes.UserBody, ctx: WriteMembers) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        _one(_members(session, ctx, "active"), user_id)
        role = shapes.our_role(body.role)
        return shapes.user(members.change(session, ctx.scope, ctx.clock, user_id, role=role))


@router.delete("/users/{user_id}")
def remove_user(user_id: str, ctx: WriteMembers) -> dict[str, Any]:
    """The member can no longer sign in, and the keys for which it answers stop working."""
    with ctx.database.transaction() as session:
        _one(_members(session, ctx, "active"), user_id)
        members.remove(session, ctx.scope, ctx.clock, user_id)
    return _deleted("organization.user", user_id)


@router.get("/invites")
def list_invites(ctx: ReadMembers, *, limit: Limit = 20, after: After = None) -> dict[str, Any]:
    """Those that are not accepted."""
    with ctx.database.read() as session:
        rows = _members(session, ctx, "invited")
    return shapes.page(rows, after, limit, lambda each: shapes.invite(each, ctx.clock))


@router.post("/invites")
def create_invite(
    body: shapes.InviteBody, ctx: WriteMembers, request: Request, targets: AlertTargetsDep
) -> dict[str, Any]:
    """`invitation` has the link, which is also mailed where the deployment sends mail."""
    if body.projects:
        raise BadRequest(
            "projects is given, but a member's role is the same in all projects.",
            next_step="Leave projects out, and give role.",
            param="projects",
        )
    role = shapes.our_role(body.role)
    with ctx.database.transaction() as session:
        member = members.add(session, ctx.scope, ctx.clock, email=body.email, role=role)
        link = LinkSender(session, ctx, base_of(request), targets).invite(member.id)
        return shapes.invite(member, ctx.clock) | {"invitation": link}


@router.get("/invites/{invite_id}")
def get_invite(invite_id: str, ctx: ReadMembers) -> dict[str, Any]:
    with ctx.database.read() as session:
        found = _one(_members(session, ctx, "invited", "active"), invite_id)
        return shapes.invite(found, ctx.clock)


@router.delete("/invites/{invite_id}")
def delete_invite(invite_id: str, ctx: WriteMembers) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        found = _one(_members(session, ctx, "invited", "active"), invite_id)
        if members.state_of(found) == "active":
            raise Conflict(
                f"{found.email} has accepted the invitation.",
                next_step=f"DELETE /v1/organization/users/{invite_id}",
            )
        members.remove(session, ctx.scope, ctx.clock, invite_id)
    return _deleted("organization.invite", invite_id)


@router.get("/admin_api_keys")
def list_admin_keys(
    ctx: ReadKeys,
    *,
    limit: Limit = 20,
    after: After = None,
    order: Annotated[str, Query(pattern="^(asc|desc)$")] = "asc",
) -> dict[str, Any]:
    """Keys of the roles owner and admin."""
    with ctx.database.read() as session:
        rows = _admin_keys(session, ctx)
        owners = _owners(session, ctx)
    if order == "desc":
        rows.reverse()
    return shapes.page(
        rows, after, limit, lambda key: shapes.admin_key(key, owners.get(key.member_id))
    )


@router.post("/admin_api_keys")
def create_admin_key(body: shapes.AdminKeyBody, ctx: WriteKeys) -> dict[str, Any]:
    """A key with the caller's role, in the oldest project. `value` is in this answer only."""
    now = ctx.clock.now()
    with ctx.database.transaction() as session:
        issued = keys.issue(
            session,
            ctx.scope,
            ctx.clock,
            project_id=_oldest_project(session, ctx),
            name=body.name,
            role=ctx.scope.role if ctx.scope.role in _ADMIN_ROLES else _ADMIN_ROLES[0],
            expires_at=_end(now, body.expires_in_seconds),
        )
        key = keys.get(session, ctx.scope, issued.id)
        shown = shapes.admin_key(key, _owners(session, ctx).get(key.member_id))
        return shown | {"value": issued.secret}


@router.get("/admin_api_keys/{key_id}")
def get_admin_key(key_id: str, ctx: ReadKeys) -> dict[str, Any]:
    with ctx.database.read() as session:
        key = _one(_admin_keys(session, ctx), key_id)
        return shapes.admin_key(key, _owners(session, ctx).get(key.member_id))


@router.delete("/admin_api_keys/{key_id}")
def revoke_admin_key(key_id: str, ctx: WriteKeys) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        keys.revoke(session, ctx.scope, ctx.clock, _one(_admin_keys(session, ctx), key_id).id)
    return _deleted("organization.admin_api_key", key_id)


def _project(session: Session, ctx: AdminContext, project_id: str) -> Project:
    return _one(organisations.projects(session, ctx.scope), project_id)


def _oldest_project(session: Session, ctx: AdminContext) -> str:
    for each in organisations.projects(session, ctx.scope):
        if each.archived_at is None:
            return each.id
    raise Conflict(
        "The organisation has no project, and each key belongs to one.",
        next_step="POST /v1/organization/projects",
    )


def _live(session: Session, ctx: AdminContext, project_id: str) -> list[ApiKey]:
    project, now = _project(session, ctx, project_id), ctx.clock.now()
    return [
        each
        for each in keys.all_of(session, ctx.scope)
        if each.project_id == project.id and keys.is_live(each, now)
    ]


def _accounts(session: Session, ctx: AdminContext, project_id: str) -> list[ApiKey]:
    return [each for each in _live(session, ctx, project_id) if each.member_id is None]


def _admin_keys(session: Session, ctx: AdminContext) -> list[ApiKey]:
    now = ctx.clock.now()
    return [
        each
        for each in keys.all_of(session, ctx.scope)
        if each.role in _ADMIN_ROLES and keys.is_live(each, now)
    ]


def _owners(session: Session, ctx: AdminContext) -> dict[str | None, Member]:
    """By id, the members who may answer for a key."""
    return {each.id: each for each in members.all_of(session, ctx.scope)}


def _members(session: Session, ctx: AdminContext, *states: str) -> list[Member]:
    rows = members.all_of(session, ctx.scope)
    return [each for each in rows if members.state_of(each) in states]


def _one(rows: Iterable[shapes.Row], row_id: str) -> shapes.Row:
    for each in rows:
        if each.id == row_id:
            return each
    raise NotFound(f"There is no {row_id[:80]!r} here.", next_step="List them.")


def _end(now: datetime, seconds: int | None) -> datetime | None:
    return None if seconds is None else now + timedelta(seconds=seconds)


def _deleted(kind: str, row_id: str) -> dict[str, Any]:
    return {"object": f"{kind}.deleted", "id": row_id, "deleted": True}
