"""/admin/v1/response-cache: a tenant's rule for its cached answers, and their erasure."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core.tenants import organisations
from core.tenants.response_cache import ERASED, SETTING
from gateway.admin.access import AdminContext, RequirePermission
from gateway.admin.schemas import CacheRuleBody

router = APIRouter(prefix="/admin/v1/response-cache", tags=["tenants"])
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("tenant", "read"))]
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("tenant", "write"))]


@router.get("")
def get_rule(ctx: ReadAccess) -> dict[str, Any]:
    """`rule` is null where only requests that ask for it are cached."""
    with ctx.database.read() as session:
        return _shown(organisations.get_tenant(session, ctx.scope).settings)


@router.put("")
def set_rule(body: CacheRuleBody, ctx: WriteAccess) -> dict[str, Any]:
    """Cache the answers of every request that the rule admits."""
    with ctx.database.transaction() as session:
        settings = {SETTING: body.model_dump()}
        changed = organisations.change_tenant(session, ctx.scope, ctx.clock, settings=settings)
        return _shown(changed.settings)


@router.delete("")
def remove_rule(ctx: WriteAccess) -> dict[str, Any]:
    """Remove the rule and erase the cached answers."""
    with ctx.database.transaction() as session:
        organisations.change_tenant(session, ctx.scope, ctx.clock, settings={SETTING: None})
        organisations.erase_cached_responses(session, ctx.scope, ctx.clock)
        return _shown(organisations.get_tenant(session, ctx.scope).settings)


@router.post("/erase")
def erase_answers(ctx: WriteAccess) -> dict[str, Any]:
    """Erase the cached answers and keep the rule."""
    with ctx.database.transaction() as session:
        organisations.erase_cached_responses(session, ctx.scope, ctx.clock)
        return _shown(organisations.get_tenant(session, ctx.scope).settings)


def _shown(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "object": "response_cache",
        "rule": settings.get(SETTING),
        "erased_at": settings.get(ERASED),
    }
