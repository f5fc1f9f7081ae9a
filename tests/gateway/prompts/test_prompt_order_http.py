"""Prompt order over HTTP: shuffled tools and changing dates share one prefix, as the tenant sets."""

from itertools import takewhile

import httpx
import pytest

from core.tenants import organisations
from core.tenants.scope import scope_of_operator
from tests.gateway.deployment import MODEL, Deployment

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "calendar", "mail")
]
RULES = "You are the assistant of a small shop and keep to its rules. " * 6


def ask(deployment: Deployment, tools: list[object], date: str) -> httpx.Response:
    body = {
        "model": MODEL,
        "max_tokens": 2,
        "tools": tools,
        "messages": [
            {"role": "system", "content": f"Today is {date}."},
            {"role": "system", "content": RULES},
            {"role": "user", "content": "Hello"},
        ],
    }
    url = f"{deployment.url}/v1/chat/completions"
    answer = httpx.post(url, json=body, headers=deployment.headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def order(deployment: Deployment, name: str | None) -> None:
    services = deployment.services
    with services.database.transaction() as session:
        scope = scope_of_operator(deployment.tenant_id)
        organisations.change_tenant(session, scope, services.clock, settings={"prompt_order": name})
    services.key_cache.poll()


@pytest.mark.parametrize(("name", "least", "most"), [("off", 0.0, 0.3), ("full", 0.7, 1.0)])
def test_full_order_shares_what_off_order_does_not(
    deployment: Deployment, name: str, least: float, most: float
) -> None:
    order(deployment, name)
    ask(deployment, TOOLS, "2026-11-20")
    told = ask(deployment, TOOLS[::-1], "2026-11-21")
    order(deployment, None)
    first, second = (request.prompt for request in deployment.engine.submitted[-2:])
    pairs = zip(first, second, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(second)
    assert least <= shared <= most
    said = told.headers["x-tollhouse-prompt-order"]
    assert said == ("off" if name == "off" else "full:tools+volatile")
    assert deployment.last_event()["prompt_order"] == said


def test_the_default_is_safe(deployment: Deployment) -> None:
    assert (
        ask(deployment, TOOLS, "2026-11-20").headers["x-tollhouse-prompt-order"].startswith("safe:")
    )
