"""A running gateway with two tenants and a key of every role."""

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from core.clock import SystemClock
from core.tenants import keys
from core.tenants.organisations import create_project, create_tenant
from core.tenants.roles import MEMBER_ROLES
from core.tenants.scope import scope_of_operator
from gateway.serving.services import Services
from tests.gateway.deployment import running_deployment

OPERATORS = "an operator's token of a test"


@dataclass
class Firm:
    id: str
    name: str
    project_id: str
    keys: dict[str, str]  # role -> secret


@dataclass
class Town:
    services: Services
    client: httpx.Client
    acme: Firm
    rival: Firm

    def call(
        self, method: str, path: str, token: str | None = None, **options: object
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return self.client.request(method, path, headers=headers, **options)  # type: ignore[arg-type]

    def as_operator(self, method: str, path: str, **options: object) -> httpx.Response:
        return self.call(method, path, OPERATORS, **options)


def _firm(services: Services, name: str) -> Firm:
    clock = SystemClock()
    with services.database.transaction() as session:
        tenant = create_tenant(session, clock, name=name)
        scope = scope_of_operator(tenant.id)
        project = create_project(session, scope, clock, name="default").id
        secrets = {
            role: keys.issue(session, scope, clock, project_id=project, name=role, role=role).secret
            for role in MEMBER_ROLES
        }
    return Firm(tenant.id, name, project, secrets)


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    place = tmp_path_factory.mktemp("town")
    with running_deployment(place, settings={"admin_token": OPERATORS}) as deployment:
        firms = [_firm(deployment.services, name) for name in ("acme", "rival")]
        with httpx.Client(base_url=deployment.url, timeout=60) as client:
            yield Town(deployment.services, client, *firms)
