"""A gateway before an upstream with a context as coding agents need it, which always says the same."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from billing.prices import ensure_default_prices
from core.clock import SystemClock
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.fake_upstream import upstream

SAYS = "A toll is a fee."
_USAGE = {"prompt_tokens": 700, "completion_tokens": 5, "total_tokens": 705}


def answer(body: dict[str, Any]) -> Any:
    """As a chat completion, streamed where the body asks for it."""
    if not body.get("stream"):
        message = {"role": "assistant", "content": SAYS}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "x", "choices": [choice], "usage": _USAGE}
    said = {"index": 0, "delta": {"role": "assistant", "content": SAYS}, "finish_reason": None}
    ended = {"index": 0, "delta": {}, "finish_reason": "stop"}
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
