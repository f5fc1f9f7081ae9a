"""The reasoning of a tool loop's turns goes back to upstreams whose entry asks for it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from core.errors import SettingError
from gateway.catalog.upstreams import read_upstreams
from gateway.request.inference import InferenceRequest
from gateway.screening.prompt_texts import screened_texts, with_redactions
from moderation.verdict import Action, Span
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream

PATH = "/v1/chat/completions"
OLD, NEW = "an old thought", "look at the sky first"
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
SAID = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
PARAMETERS = {"type": "object", "properties": {}}
FUNCTION = {"name": "look", "parameters": PARAMETERS}


def call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}


def chat(thought: str, name: str) -> list[dict[str, Any]]:
    turn = {"role": "assistant", "content": None, "tool_calls": [call(name)]}
    return [
        {"role": "user", "content": "Rain?"},
        {**turn, "reasoning_content": thought},
        {"role": "tool", "tool_call_id": name, "content": "clouds"},
    ]


def blocks(thought: str, name: str) -> list[dict[str, Any]]:
    thinking = {"type": "thinking", "thinking": thought, "signature": "c2ln"}
    used = {"type": "tool_use", "id": name, "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": name, "content": "clouds"}
    return [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": [thinking, used]},
        {"role": "user", "content": [result]},
    ]


def items(thought: str, name: str) -> list[dict[str, Any]]:
    text = {"type": "reasoning_text", "text": thought}
    return [
        {"role": "user", "content": "Rain?"},
        {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": [text]},
        {"type": "function_call", "call_id": name, "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": name, "output": "clouds"},
    ]


SURFACES: dict[str, dict[str, Any]] = {
    PATH: {
        "messages": chat(OLD, "a") + chat(NEW, "b"),
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "/v1/messages": {
        "messages": blocks(OLD, "a") + blocks(NEW, "b"),
        "tools": [{"name": "look", "input_schema": PARAMETERS}],
        "max_tokens": 9,
    },
    "/v1/responses": {
        "input": items(OLD, "a") + items(NEW, "b"),
        "tools": [{"type": "function", **FUNCTION}],
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with upstream() as made:
        made.answers[PATH] = {"choices": [SAID], "usage": USAGE}
        made.also = frozenset(("reasoning_content",))
        yield made


@pytest.fixture(scope="module")
def gateway(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    entry: dict[str, Any] = {"url": server.url, "capabilities": ["tools"]}
    listed = [
        {**entry, "name": "a", "model": "thinks", "reasoning_back": True},
        {**entry, "name": "b", "model": "forgets"},
    ]
    path = tmp_path_factory.mktemp("loop")
    settings = {"upstreams": json.dumps(listed)}
    with running_deployment(path, settings=settings, engines=None) as made:
        with made.services.database.transaction() as session:
            for model in ("thinks", "forgets"):
                ensure_default_prices(session, SystemClock(), model)
        made.services.prices.refresh()
        yield made


@pytest.mark.parametrize("model", ["thinks", "forgets"])
@pytest.mark.parametrize("surface", SURFACES)
def test_the_thought_before_the_last_calls_goes_back(
    gateway: Deployment, server: Server, surface: str, model: str
) -> None:
    body = {"model": model, **SURFACES[surface]}
    answer = httpx.post(gateway.url + surface, json=body, headers=gateway.headers, timeout=60)
    assert answer.status_code == 200, answer.text
    sent = {
        each["tool_calls"][0]["id"]: each.get("reasoning_content")
        for each in server.asked[-1][1]["messages"]
        if each.get("tool_calls")
    }
    assert sent == {"a": None, "b": NEW if model == "thinks" else None}


def test_it_is_screened_and_redacted_like_a_message() -> None:
    thoughts = {"b": NEW}
    asked = InferenceRequest(PATH, "m", messages=chat("", "b"), tool_reasoning=thoughts)
    texts = [each.text for each in screened_texts(asked)]
    assert NEW in texts
    cut = Span(
        texts.index(NEW), NEW.index("sky"), NEW.index("sky") + 3, "place", "r", Action.REDACT
    )
    kept = with_redactions(asked, [cut])
    assert kept.tool_reasoning == {"b": "look at the [PLACE] first"}


def test_the_option_is_true_or_false() -> None:
    with pytest.raises(SettingError, match="reasoning_back"):
        read_upstreams('[{"url": "http://x", "reasoning_back": "yes"}]')
