"""A hit of the response cache where the model is another server's: the same bytes, the same bill."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from billing.pricing.prices import ensure_default_prices, get_version
from billing.pricing.pricing import Component
from billing.rating.rating import rate
from billing.usage.tables import Charge
from core.clock import SystemClock
from core.settings import Settings
from gateway.catalog.upstreams import read_upstreams
from gateway.engines.clients import make_engines
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream

PATH = "/v1/chat/completions"
USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
WORDS = ["Grü", "ße", " aus ", "Köln \U0001f309"]
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def answered(body: dict[str, Any]) -> Any:
    """Text, or a call where there is a tool; streamed where it is asked for."""
    called = bool(body.get("tools"))
    if not body.get("stream"):
        message: dict[str, Any] = {"role": "assistant", "content": "".join(WORDS)}
        if called:
            message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        reason = "tool_calls" if called else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {"choices": [choice], "usage": USAGE}
    deltas: list[dict[str, Any]] = [{"content": word} for word in WORDS]
    if called:
        deltas = [{"tool_calls": [{"index": 0, **CALL}]}]
    reason = "tool_calls" if called else "stop"
    return [
        *({"choices": [{"index": 0, "delta": each, "finish_reason": None}]} for each in deltas),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {"choices": [], "usage": USAGE},
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with upstream() as made:
        made.answers[PATH] = answered
        yield made


@pytest.fixture(scope="module")
def deployment(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    path = tmp_path_factory.mktemp("cached-text")
    entries = json.dumps([{"url": server.url, "name": "t", "model": "text"}])
    engines = make_engines(
        Settings(data_dir=path), read_upstreams(entries), lambda _r: None, lambda _n, _e: None
    )
    with running_deployment(path, settings={"upstreams": entries}, engines=engines) as made:
        with made.services.database.transaction() as session:
            ensure_default_prices(session, SystemClock(), "text")
        made.services.prices.refresh()
        yield made


def alike(answer: httpx.Response) -> str:
    """The body without what is of one request: its id, its time and its usage, which a hit has none
    of."""
    shown = re.sub(r'"id":"chatcmpl-[^"]+"|"created":\d+', "", answer.text)
    return re.sub(r'"usage":{("[a-z_]+":({[^}]*}|\d+),?)+}', "", shown)


def charge_of(deployment: Deployment, request_id: str) -> int:
    deployment.event(request_id)
    with deployment.services.database.transaction() as session:
        while rate(session, SystemClock()).events:
            continue
        return session.get_one(Charge, request_id).amount


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_hit_has_the_bytes_of_the_first_answer_and_its_own_price(
    deployment: Deployment, server: Server, stream: bool, tools: bool
) -> None:
    body: dict[str, Any] = {
        "model": "text",
        "messages": [{"role": "user", "content": f"Hi {stream} {tools}"}],
        "temperature": 0,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    if tools:
        function = {"name": "look", "parameters": {"type": "object"}}
        body["tools"] = [{"type": "function", "function": function}]
    headers = deployment.headers | {"x-tollhouse-cache": "on, tools" if tools else "on"}
    before = len(server.asked)
    first, second = (
        httpx.post(f"{deployment.url}{PATH}", json=body, headers=headers) for _ in range(2)
    )
    assert first.status_code == second.status_code == 200, first.text
    notes = [each.headers["x-tollhouse-cache"].partition(";")[0] for each in (first, second)]
    assert notes == ["miss", "hit"] and len(server.asked) == before + 1
    assert alike(first) == alike(second)
    assert "Köln" in first.text or "look" in first.text
    events = [deployment.event(each.headers["x-request-id"]) for each in (first, second)]
    assert [each["kind"] for each in events] == ["generation", "cache_hit"]
    assert [each["output_tokens"] for each in events] == [4, 0]
    with deployment.services.database.read() as session:
        (price,) = {each["price_version"] for each in events}

        rates = get_version(session, price).linear
    new = 9 * rates[Component.INPUT] + 4 * rates[Component.OUTPUT] + rates.get(Component.REQUEST, 0)
    costs = [charge_of(deployment, each.headers["x-request-id"]) for each in (first, second)]
    assert costs == [new, rates.get(Component.REQUEST, 0)]
