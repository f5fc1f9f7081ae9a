"""With TOLLHOUSE_METRICS_TOKEN, figures and the parts of the deployment are not public."""

import httpx
import pytest

from tests.gateway.deployment import running_deployment

TOKEN = "a token of the operator's"


def test_metrics_and_the_parts_of_readiness_need_the_token(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("metrics")
    with running_deployment(folder, settings={"metrics_token": TOKEN}) as deployment:
        for wrong in ({}, {"authorization": "Bearer wrong"}, deployment.headers):
            assert httpx.get(f"{deployment.url}/metrics", headers=wrong).status_code == 401
            ready = httpx.get(f"{deployment.url}/readyz", headers=wrong)
            assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
        right = {"authorization": f"Bearer {TOKEN}"}
        assert "tollhouse_" in httpx.get(f"{deployment.url}/metrics", headers=right).text
        assert httpx.get(f"{deployment.url}/readyz", headers=right).json()["parts"]
