"""Browsers without a browser: signed-in HTTP clients of a served house, by role."""

import httpx
from sqlalchemy import select

from core.tenants.keys import issue
from core.tenants.models import Project
from core.tenants.scope import scope_of_operator
from tests.gateway.served import House


def browser(house: House, secret: str | None = None) -> httpx.Client:
    client = httpx.Client(
        base_url=house.url, follow_redirects=True, timeout=60, headers={"origin": house.url}
    )
    if secret is not None:
        answer = client.post("/dashboard/sign-in", data={"secret": secret})
        assert answer.status_code == 200, answer.text
    return client


def with_role(house: House, role: str, tenant_id: str = "") -> str:
    """The secret of a fresh key."""
    services = house.services
    scope = scope_of_operator(tenant_id or house.tenant_id)
    with services.database.transaction() as session:
        project = session.scalars(
            select(Project.id).where(Project.tenant_id == scope.tenant_id)
        ).first()
        assert project is not None
        return issue(
            session, scope, services.clock, project_id=project, name=role, role=role
        ).secret
