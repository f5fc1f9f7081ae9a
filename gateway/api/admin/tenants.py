"""/admin/v1/tenants, /tenant and /projects."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core.tenants import organisations
from gateway.api.admin.access import Allowed, OperatorOnly, OperatorVisit, Visit
from gateway.schemas.admin import NewProject, NewTenant, TenantChange

router = APIRouter(prefix="/admin/v1", tags=["tenants"])


@router.get("/tenants")
def list_tenants(
    visit: Annotated[OperatorVisit, Depends(OperatorOnly("tenants", "read"))],
) -> dict[str, Any]:
    with visit.services.database.read() as session:
        listed = [organisations.describe(each) for each in organisations.all_tenants(session)]
    return {"object": "list", "data": listed}


@router.post("/tenants", status_code=201)
def create_tenant(
    body: NewTenant,
    visit: Annotated[OperatorVisit, Depends(OperatorOnly("tenants", "write"))],
) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        made = organisations.create_tenant(session, services.clock, **body.model_dump())
        return organisations.describe(made)


@router.get("/tenant")
def get_tenant(visit: Annotated[Visit, Depends(Allowed("tenant", "read"))]) -> dict[str, Any]:
    with visit.services.database.read() as session:
        return organisations.describe(organisations.get_tenant(session, visit.scope))


@router.patch("/tenant")
def change_tenant(
    body: TenantChange, visit: Annotated[Visit, Depends(Allowed("tenant", "write"))]
) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        changed = organisations.change_tenant(
            session, visit.scope, services.clock, **body.model_dump(exclude_unset=True)
        )
        return organisations.describe(changed)


@router.get("/projects")
def list_projects(visit: Annotated[Visit, Depends(Allowed("projects", "read"))]) -> dict[str, Any]:
    with visit.services.database.read() as session:
        found = organisations.projects(session, visit.scope)
        return {"object": "list", "data": [organisations.describe_project(each) for each in found]}


@router.post("/projects", status_code=201)
def create_project(
    body: NewProject, visit: Annotated[Visit, Depends(Allowed("projects", "write"))]
) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        made = organisations.create_project(session, visit.scope, services.clock, name=body.name)
        return organisations.describe_project(made)


@router.delete("/projects/{project_id}")
def archive_project(
    project_id: str, visit: Annotated[Visit, Depends(Allowed("projects", "write"))]
) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        archived = organisations.archive_project(session, visit.scope, services.clock, project_id)
        return organisations.describe_project(archived)
