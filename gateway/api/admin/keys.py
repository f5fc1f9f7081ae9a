"""/admin/v1/keys. Only the response that creates a key contains its secret."""

from datetime import timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core.errors import BadRequest
from core.tenants import key_changes, keys
from core.tenants.key_scopes import KeyScopes
from gateway.api.admin.access import AdminContext, RequirePermission
from gateway.api.admin.schemas import KeyChange, KeyRotation, NewKey

router = APIRouter(prefix="/admin/v1/keys", tags=["keys"])
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("keys", "read"))]
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("keys", "write"))]


@router.get("")
def list_keys(ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = keys.all_of(session, ctx.scope)
        return {"object": "list", "data": [keys.describe(each) for each in rows]}


@router.post("", status_code=201)
def issue_key(body: NewKey, ctx: WriteAccess) -> dict[str, Any]:
    if body.expires_at is not None and body.expires_at.tzinfo is None:
        raise BadRequest(
            "expires_at has no time zone.",
            next_step="Write it like 2027-01-31T00:00:00Z.",
            param="expires_at",
        )
    with ctx.database.transaction() as session:
        issued = keys.issue(
            session,
            ctx.scope,
            ctx.clock,
            project_id=body.project_id,
            name=body.name,
            role=body.role,
            scopes=_scopes(body),
            allowed_ips=tuple(body.allowed_ips),
            expires_at=body.expires_at,
            routing=body.routing.model_dump(exclude_none=True) if body.routing else None,
        )
        return _shown(session, ctx, issued)


@router.post("/{key_id}/rotate", status_code=201)
def rotate_key(key_id: str, body: KeyRotation, ctx: WriteAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        overlap = timedelta(seconds=body.overlap_s)
        issued = keys.rotate(session, ctx.scope, ctx.clock, key_id, overlap=overlap)
        return _shown(session, ctx, issued)


@router.patch("/{key_id}")
def change_key(key_id: str, body: KeyChange, ctx: WriteAccess) -> dict[str, Any]:
    """Change what the key may use, its fallback chains and its canaries."""
    named = body.model_dump(exclude_unset=True)
    with ctx.database.transaction() as session:
        changed = key_changes.change(
            session,
            ctx.scope,
            ctx.clock,
            key_id,
            scopes=named.get("scopes"),
            routing=named.get("routing"),
        )
        return keys.describe(changed)


@router.delete("/{key_id}")
def revoke_key(key_id: str, ctx: WriteAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        keys.revoke(session, ctx.scope, ctx.clock, key_id)
        return keys.describe(keys.get(session, ctx.scope, key_id))


def _shown(session: Any, ctx: AdminContext, issued: keys.IssuedKey) -> dict[str, Any]:
    key = keys.describe(keys.get(session, ctx.scope, issued.id))
    return key | {"secret": issued.secret}


def _scopes(body: NewKey) -> KeyScopes:
    listed = body.scopes.model_dump(exclude_none=True)
    return KeyScopes(**{name: frozenset(values) for name, values in listed.items()})
