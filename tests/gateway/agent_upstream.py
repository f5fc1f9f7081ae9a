"""A gateway before an upstream with a context as coding agents need it. It calls `get_weather` where that
is offered and was not called yet, and says the same in every other answer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.fake_upstream import upstream

SAYS = "A toll is a fee."
_USAGE = {"prompt_tokens": 700, "completion_tokens": 5, "total_tokens": 705}

_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
}
asked: list[dict[str, Any]] = []  # bodies that came, in their order


def answer(body: dict[str, Any]) -> Any:
    """As a chat completion, streamed where the body asks for it."""
    asked.append(body)
    offered = [each["function"]["name"] for each in body.get("tools") or ()]
    called = any(message["role"] == "tool" for message in body["messages"])
    calls = "get_weather" in offered and not called
    message = {"role": "assistant", "content": None if calls else SAYS}
    message |= {"tool_calls": [_CALL]} if calls else {}
    reason = "tool_calls" if calls else "stop"
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {"id": "x", "choices": [choice], "usage": _USAGE}
    said = {"index": 0, "delta": message, "finish_reason": None}
    ended = {"index": 0, "delta": {}, "finish_reason": reason}
    return [{"id": "x", "choices": part} for part in ([said], [ended])] + [
        {"id": "x", "choices": [], "usage": _USAGE}
    ]


@contextmanager
def deployment_for_agents(folder: Path) -> Iterator[Deployment]:
    with upstream() as server:
        server.answers["/v1/chat/completions"] = answer
        entry = {"url": server.url, "name": "u", "model": MODEL, "context_length": 200_000}
        entry["capabilities"] = ["tools", "json", "images"]
        settings = {"upstreams": json.dumps([entry])}
        with running_deployment(folder, settings=settings, engines=None) as made:
            with made.services.database.transaction() as session:
                ensure_default_prices(session, SystemClock(), MODEL)
            made.services.prices.refresh()
            yield made
