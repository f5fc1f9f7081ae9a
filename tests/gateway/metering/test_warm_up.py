"""The start's own request is nobody's usage, and only the operator can mark a request so."""

from contextlib import closing

import httpx
import pytest

from billing.rating.rating_worker import rate_all
from billing.usage import service_rollups
from gateway.cli.serve.ready import warm_up
from gateway.cli.serve.startup import StartupInfo
from gateway.serving.headers import WARM_UP_HEADER
from tests.dashboards.browser_client import browser
from tests.gateway.deployment import MODEL, Deployment


def test_the_warm_up_is_recorded_and_charged_to_nobody(deployment: Deployment) -> None:
    info = StartupInfo(True, "demo", deployment.key, False)
    warm_up(deployment.url, info, MODEL, deployment.services.operator_token)
    event = deployment.last_event()
    assert deployment.engine.receipts_given[event["request_id"]].generated == 1
    assert (event["finish_reason"], event["paid_by"], event["status"]) == (
        "warm_up",
        "operator",
        200,
    )
    figures = ("input_tokens", "cached_tokens", "output_tokens", "waived_tokens", "quantity")
    assert [event[name] for name in figures] == [0] * 5
    with closing(browser(deployment, deployment.key)) as owner:
        assert event["request_id"] not in owner.get("/dashboard/requests").text
        ask(deployment)
        shown = deployment.last_event()["request_id"]
        assert shown in owner.get("/dashboard/requests").text
        assert rate_all(deployment.services.database, deployment.services.clock) >= 1
        service_rollups.sum_all(deployment.services.database, deployment.services.clock)
        page = owner.get("/dashboard/usage?by=end_user").text
        levels = page[page.index("Service levels") :]
        assert "generation" not in levels and "all requests" in levels


def ask(deployment: Deployment) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": MODEL, "max_tokens": 1, "messages": messages, "user": "ann"}
    url = f"{deployment.url}/v1/chat/completions"
    assert httpx.post(url, json=body, headers=deployment.headers, timeout=60).status_code == 200


@pytest.mark.parametrize("token", ["", "guess"])
def test_a_customer_cannot_mark_a_request_as_free(deployment: Deployment, token: str) -> None:
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    headers = deployment.headers | {WARM_UP_HEADER: token}
    httpx.post(f"{deployment.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    event = deployment.last_event()
    assert event["finish_reason"] != "warm_up" and event["input_tokens"] > 0
