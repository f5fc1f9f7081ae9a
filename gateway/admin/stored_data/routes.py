"""/admin/v1/tenant/export and /admin/v1/tenants/{tenant}/erase."""

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import FileResponse
from starlette.background import BackgroundTask

from core.tenants import organisations
from core.tenants.access import scope_for
from core.tenants.scope import TenantScope
from gateway.admin.access import AdminContext, OperatorContext, RequireOperator, RequirePermission
from gateway.admin.schemas import TenantErasureBody
from gateway.admin.stored_data.end_users import MOST_ERASURES
from gateway.admin.stored_data.erasing import kept
from gateway.admin.stored_data.stored_data import StoredData
from gateway.edge.threads import Work, run_queued
from gateway.serving.api.dependencies import OperatorToken, SettingsDep

router = APIRouter(prefix="/admin/v1", tags=["tenants"])
MOST_EXPORTS = 2  # of a tenant, running and waiting, in a process


@router.post("/tenant/export", response_class=FileResponse)
async def export(
    ctx: Annotated[AdminContext, Depends(RequirePermission("tenant", "write"))],
    settings: SettingsDep,
    token: OperatorToken,
) -> FileResponse:
    """All that is stored of the organisation, as a ZIP archive: a file of JSON Lines for each table, its
    files and adapters. Secrets are not in it."""
    stored = StoredData.of(ctx.database, settings, ctx.clock, token)
    work = partial(export_file, stored, ctx.scope)
    path = await run_queued(Work.EXPORTS, ctx.scope.tenant_id, MOST_EXPORTS, work)
    return FileResponse(
        path,
        media_type="application/zip",
        filename=f"{ctx.scope.tenant_id}.zip",
        background=BackgroundTask(path.unlink, missing_ok=True),
    )


def export_file(stored: StoredData, scope: TenantScope) -> Path:
    """A temporary file with the archive; the caller deletes it."""
    descriptor, name = tempfile.mkstemp(prefix="tollhouse-export-", suffix=".zip")
    os.close(descriptor)
    path = Path(name)
    try:
        stored.export(scope, path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


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
