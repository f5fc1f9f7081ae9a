"""/admin/v1/tenants, /tenant and /projects."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from billing.adjustments import onboarding
from core.tenants import members, organisations
from gateway.admin.access import AdminContext, OperatorContext, RequireOperator, RequirePermission
from gateway.admin.schemas import NewProject, NewTenant, TenantChange

router = APIRouter(prefix="/admin/v1", tags=["tenants"])


@router.get("/tenants")
def list_tenants(
    ctx: Annotated[OperatorContext, Depends(RequireOperator("tenants", "read"))],
) -> dict[str, Any]:
    with ctx.database.read() as session:
        listed = [organisations.describe(each) for each in organisations.all_tenants(session)]
    return {"object": "list", "data": listed}


@router.post("/tenants", status_code=201)
def create_tenant(
    body: NewTenant,
    ctx: Annotated[OperatorContext, Depends(RequireOperator("tenants", "write"))],
) -> dict[str, Any]:
    """Create a tenant with its billing account and first project; with `owner` and `key` its first
    member and key too. The key's secret is in this answer only."""
    hashed = None
    if body.owner is not None and body.owner.password:
        hashed = members.hash_for(ctx.database, body.owner.email, body.owner.password)
    with ctx.database.transaction() as session:
        made = onboarding.onboard(session, ctx.clock, body.customer(hashed), ctx.actor.id)
        return made.describe()


@router.get("/tenant")
def get_tenant(
    ctx: Annotated[AdminContext, Depends(RequirePermission("tenant", "read"))],
) -> dict[str, Any]:
    with ctx.database.read() as session:
        return organisations.describe(organisations.get_tenant(session, ctx.scope))


@router.patch("/tenant")
def change_tenant(
    body: TenantChange, ctx: Annotated[AdminContext, Depends(RequirePermission("tenant", "write"))]
) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        changed = organisations.change_tenant(
            session, ctx.scope, ctx.clock, **body.model_dump(exclude_unset=True)
        )
        return organisations.describe(changed)


@router.get("/projects")
def list_projects(
    ctx: Annotated[AdminContext, Depends(RequirePermission("projects", "read"))],
) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = organisations.projects(session, ctx.scope)
        return {"object": "list", "data": [organisations.describe_project(each) for each in rows]}


@router.post("/projects", status_code=201)
def create_project(
    body: NewProject, ctx: Annotated[AdminContext, Depends(RequirePermission("projects", "write"))]
) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        created = organisations.create_project(session, ctx.scope, ctx.clock, name=body.name)
        return organisations.describe_project(created)


@router.delete("/projects/{project_id}")
def archive_project(
    project_id: str, ctx: Annotated[AdminContext, Depends(RequirePermission("projects", "write"))]
) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        archived = organisations.archive_project(session, ctx.scope, ctx.clock, project_id)
        return organisations.describe_project(archived)
