"""Signed-in HTTP clients of a deployment's pages, by role."""

import httpx
from sqlalchemy import select

from core.tenants.keys import issue
from core.tenants.models import Project
from core.tenants.scope import scope_of_operator
from tests.gateway.deployment import Deployment


def browser(deployment: Deployment, secret: str | None = None) -> httpx.Client:
    client = httpx.Client(
        base_url=deployment.url,
        follow_redirects=True,
        timeout=60,
        headers={"origin": deployment.url},
        event_hooks={"response": [_is_safe_to_reload]},
    )
    if secret is not None:
        answer = client.post("/dashboard/sign-in", data={"secret": secret})
        assert answer.status_code == 200, answer.text
    return client


_PREVIEWS = (b"act=preview", b"act=try", b"act=threshold")  # the last edits the text of a draft


def _is_safe_to_reload(answer: httpx.Response) -> None:
    """Every form that changed something answers with a redirect, so that a reload sends nothing again.
    A preview changes nothing, and is the answer itself."""
    request = answer.request
    if request.method != "POST" or not request.url.path.startswith("/dashboard"):
        return
    sent = request.read()
    if answer.status_code < 400 and not any(act in sent for act in _PREVIEWS):
        assert answer.status_code == 303, f"{request.url.path}: {sent[:80]!r}"


def with_role(deployment: Deployment, role: str, tenant_id: str = "") -> str:
    """The secret of a fresh key."""
    services = deployment.services
    scope = scope_of_operator(tenant_id or deployment.tenant_id)
    with services.database.transaction() as session:
        project = session.scalars(
            select(Project.id).where(Project.tenant_id == scope.tenant_id)
        ).first()
        assert project is not None
        return issue(
            session, scope, services.clock, project_id=project, name=role, role=role
        ).secret
