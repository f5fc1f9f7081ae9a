"""/admin/v1/keys. Only the response that creates a key contains its secret."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from sqlalchemy.orm import Session

from core.errors import BadRequest
from core.tenants import adapters, key_changes, key_routing, key_scopes, keys
from core.tenants.key_scopes import KeyScopes
from core.tenants.scope import TenantScope
from gateway.admin.access import AdminContext, RequirePermission
from gateway.admin.schemas import KeyChange, KeyRotation, NewKey
from gateway.catalog.catalog import Catalog
from gateway.serving.api.dependencies import CatalogDep

router = APIRouter(prefix="/admin/v1/keys", tags=["keys"])
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("keys", "read"))]
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("keys", "write"))]


@router.get("")
def list_keys(ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = keys.all_of(session, ctx.scope)
        return {"object": "list", "data": [keys.describe(each) for each in rows]}


@router.post("", status_code=201)
def issue_key(
    body: NewKey, ctx: WriteAccess, catalog: CatalogDep, request: Request
) -> dict[str, Any]:
    _check_zone(body.expires_at)
    scopes = body.scopes.model_dump(exclude_none=True)
    routing = body.routing.model_dump(exclude_none=True) if body.routing else None
    key_routing.check(routing or {}, "routing")
    with ctx.database.transaction() as session:
        check_names(
            session,
            ctx.scope,
            catalog,
            lambda: request.app.openapi()["paths"],
            KeyNames(scopes, routing),
        )
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
            routing=routing,
        )
        return _shown(session, ctx, issued)


@router.post("/{key_id}/rotate", status_code=201)
def rotate_key(key_id: str, body: KeyRotation, ctx: WriteAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        overlap = timedelta(seconds=body.overlap_s)
        issued = keys.rotate(session, ctx.scope, ctx.clock, key_id, overlap=overlap)
        return _shown(session, ctx, issued)


@router.patch("/{key_id}")
def change_key(
    key_id: str, body: KeyChange, ctx: WriteAccess, catalog: CatalogDep, request: Request
) -> dict[str, Any]:
    """Change the key's name, what it may use, from where and until when, and its routing."""
    _check_zone(body.expires_at)
    named = body.model_dump(exclude_unset=True)
    scopes, routing = named.get("scopes"), named.get("routing")
    no_end = "expires_at" in named and body.expires_at is None
    key_routing.check(routing or {}, "routing")
    with ctx.database.transaction() as session:
        keys.get(session, ctx.scope, key_id)
        check_names(
            session,
            ctx.scope,
            catalog,
            lambda: request.app.openapi()["paths"],
            KeyNames(scopes, routing),
        )
        changed = key_changes.change(
            session,
            ctx.scope,
            ctx.clock,
            key_id,
            key_changes.KeyChange(**named, no_end=no_end),
        )
        return keys.describe(changed)


@router.delete("/{key_id}")
def revoke_key(key_id: str, ctx: WriteAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        keys.revoke(session, ctx.scope, ctx.clock, key_id)
        return keys.describe(keys.get(session, ctx.scope, key_id))


def _shown(session: Session, ctx: AdminContext, issued: keys.IssuedKey) -> dict[str, Any]:
    key = keys.describe(keys.get(session, ctx.scope, issued.id))
    return key | {"secret": issued.secret}


@dataclass(frozen=True, slots=True)
class KeyNames:
    """The names in a key's scopes and in its routing."""

    scopes: Mapping[str, Any] | None
    routing: Mapping[str, Any] | None


def check_names(
    session: Session,
    scope: TenantScope,
    catalog: Catalog,
    paths: Callable[[], Collection[str]],
    given: KeyNames,
) -> None:
    """BadRequest for a model, an adapter or a route that does not exist. `paths` are
    those of the API, which take a while to find."""
    own = [each.name for each in adapters.all_of(session, scope)]
    scopes, routing = given.scopes or {}, given.routing or {}
    key_scopes.check(scopes)
    key_scopes.check_names(scopes, routing, catalog.model_names(), own)
    if routes := scopes.get("routes"):
        key_scopes.check_routes(routes, paths())


def _check_zone(at: datetime | None) -> None:
    if at is not None and at.tzinfo is None:
        raise BadRequest(
            "expires_at has no time zone.",
            next_step="Write it like 2027-01-31T00:00:00Z.",
            param="expires_at",
        )


def _scopes(body: NewKey) -> KeyScopes:
    listed = body.scopes.model_dump(exclude_none=True)
    return KeyScopes(**{name: frozenset(values) for name, values in listed.items()})
