"""One running gateway per module."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.gateway.deployment import Deployment, running_deployment


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_deployment(tmp_path_factory.mktemp("gateway")) as made:
        yield made


@pytest.fixture
def client(deployment: Deployment) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{deployment.url}/v1", api_key=deployment.key, max_retries=0, timeout=60
    ) as made:
        yield made
