"""/admin/v1/audit: the audit log, newest first."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from core.tenants import audit
from gateway.api.admin.access import AdminContext, RequirePermission

router = APIRouter(prefix="/admin/v1/audit", tags=["audit"])


@router.get("")
def list_entries(
    ctx: Annotated[AdminContext, Depends(RequirePermission("audit", "read"))],
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=0, description="List entries below this id.")] = None,
    action: Annotated[str | None, Query(max_length=80)] = None,
) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = audit.entries(session, ctx.scope, limit=limit + 1, before_id=before, action=action)
    listed = [audit.describe(entry) for entry in rows[:limit]]
    return {"object": "list", "data": listed, "has_more": len(rows) > limit}
