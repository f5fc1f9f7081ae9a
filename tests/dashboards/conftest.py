"""One running gateway per file, and signed-in clients of it.

A file that needs data has a fixture `deployment` of its own that asks for this one and fills it.
"""

from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from tests.dashboards.browser_client import browser
from tests.gateway.deployment import Deployment, running_deployment


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_deployment(tmp_path_factory.mktemp("dashboards")) as made:
        yield made


@pytest.fixture
def owner(deployment: Deployment) -> Iterator[httpx.Client]:
    with closing(browser(deployment, deployment.key)) as client:
        yield client


@pytest.fixture
def operator(deployment: Deployment) -> Iterator[httpx.Client]:
    """Signed in; its requests to `/admin/v1` have the operator's token."""
    with closing(browser(deployment, deployment.services.operator_token)) as client:
        client.headers["authorization"] = f"Bearer {deployment.services.operator_token}"
        yield client
