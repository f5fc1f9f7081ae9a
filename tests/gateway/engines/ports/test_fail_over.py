"""A request whose provider fails before its first token goes on to another provider."""

import json
from collections.abc import Iterator

import httpx
import pytest

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.engines.ports.answers import MADE, TEXT
from tests.gateway.provider_server import Provider, Said, provider, whole

FIRST, SECOND = MADE["anthropic"], MADE["gemini"]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Provider, Provider]]:
    with provider() as first, provider() as second:
        second.said = SECOND.stream(False, 0)
        yield first, second


@pytest.fixture(scope="module")
def gateway(
    servers: tuple[Provider, Provider], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    listed = [
        {
            "url": server.url,
            "provider": made.name,
            "model": made.name,
            "upstream_model": made.model,
            "api_key": "k",
        }
        for server, made in zip(servers, (FIRST, SECOND), strict=True)
    ]
    settings = {"upstreams": json.dumps(listed), "fallbacks": "anthropic=gemini"}
    path = tmp_path_factory.mktemp("over")
    with running_deployment(path, settings=settings, engines=None) as made:
        with made.services.database.transaction() as session:
            for model in ("anthropic", "gemini"):
                ensure_default_prices(session, SystemClock(), model)
        made.services.prices.refresh()
        yield made


@pytest.mark.parametrize(
    "fault",
    [
        whole({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}, 529),
        whole({"type": "error", "error": {"type": "rate_limit_error", "message": "slow"}}, 429),
        Said(b"<html>bad gateway</html>", "text/html", 502),
        Said(
            b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n',
            "text/event-stream",
        ),
    ],
    ids=["529", "429", "page", "event"],
)
def test_another_provider_answers_and_is_billed_once(
    gateway: Deployment, servers: tuple[Provider, Provider], fault: Said
) -> None:
    servers[0].said = fault
    body = {"model": "anthropic", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    answer = httpx.post(
        f"{gateway.url}/v1/chat/completions", json=body, headers=gateway.headers, timeout=60
    )
    assert answer.status_code == 200, answer.text
    said = [json.loads(x[6:]) for x in answer.text.splitlines() if x.startswith("data: {")]
    text = "".join(c["delta"].get("content") or "" for e in said for c in e["choices"])
    assert text == TEXT
    event = gateway.event(answer.headers["x-request-id"])
    assert (event["model"], event["output_tokens"]) == ("gemini", SECOND.usage.output)
    assert "fallback from anthropic" in event["routed"]
