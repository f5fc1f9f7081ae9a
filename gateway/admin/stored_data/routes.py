"""/admin/v1/tenant/export and /admin/v1/tenants/{tenant}/erase."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from core.tenants import organisations
from core.tenants.access import scope_for
from gateway.admin.access import AdminContext, OperatorContext, RequireOperator, RequirePermission
from gateway.admin.schemas import TenantErasureBody
from gateway.admin.stored_data.archives import Download, download
from gateway.admin.stored_data.end_users import MOST_ERASURES
from gateway.admin.stored_data.erasing import kept
from gateway.admin.stored_data.stored_data import StoredData
from gateway.edge.threads import Work, run_queued
from gateway.serving.api.dependencies import OperatorToken, SettingsDep

router = APIRouter(prefix="/admin/v1", tags=["tenants"])


@router.post("/tenant/export", response_class=Download, status_code=200)
async def export(
    ctx: Annotated[AdminContext, Depends(RequirePermission("tenant", "write"))],
    settings: SettingsDep,
    token: OperatorToken,
) -> Response:
    """All that is stored of the organisation, as a ZIP archive: a file of JSON Lines for each table, its
    files and adapters. Secrets are not in it. An organisation has two at a time in each process, and an
    hour for each, writing and downloading."""
    return await download(StoredData.of(ctx.database, settings, ctx.clock, token), ctx.scope)


@router.post("/tenants/{name}/erase")
async def erase(
    name: str,
    body: TenantErasureBody,
    ctx: Annotated[OperatorContext, Depends(RequireOperator("tenants", "write"))],
    settings: SettingsDep,
    token: OperatorToken,
) -> dict[str, Any]:
    """Erase all that is stored of a closed tenant, but for the books, which the law keeps. It cannot be
    undone, and is repeated after a restore from a backup."""
    with ctx.database.read() as session:
        tenant_id = organisations.tenant_named(session, name).id
    scope = scope_for(ctx.actor, tenant_id)
    stored = StoredData.of(ctx.database, settings, ctx.clock, token)
    work = partial(stored.erase_tenant, scope, body.confirm)
    erased = await run_queued(Work.ERASURES, tenant_id, MOST_ERASURES, work)
    return {"object": "erasure", "tenant": tenant_id, "erased": erased, "kept": kept()}
