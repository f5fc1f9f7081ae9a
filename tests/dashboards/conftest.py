"""Signed-in clients of the deployment that a test file starts as its fixture `deployment`."""

from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from tests.dashboards.browser_client import browser
from tests.gateway.deployment import Deployment


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
