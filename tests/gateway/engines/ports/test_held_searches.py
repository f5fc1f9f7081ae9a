"""Budgets hold the price of the searches and tool calls that an entry says one request makes."""

import json
from pathlib import Path

import httpx

from billing.pricing.prices import PriceDraft, save
from gateway.catalog.upstreams import Upstream
from gateway.engines.clients import _bound
from tests.gateway.deployment import running_deployment
from tests.gateway.engines.ports.answers import MADE
from tests.gateway.provider_server import provider


def test_a_request_is_refused_whose_searches_a_budget_cannot_pay(tmp_path: Path) -> None:
    made = MADE["anthropic"]
    with provider() as server:
        server.said = made.whole(False)
        plain = {
            "url": server.url,
            "provider": "anthropic",
            "upstream_model": made.model,
            "api_key": "k",
        }
        held = {"name": "held", "model": "held", "most_searches": 5, "most_tool_calls": 1}
        settings = {
            "upstreams": json.dumps([plain | held, plain | {"name": "free", "model": "free"}])
        }
        with running_deployment(tmp_path, settings=settings, engines=None) as gateway:
            clock = gateway.services.clock
            with gateway.services.database.transaction() as session:
                for model in ("held", "free"):
                    rates = {"input": "1", "output": "1", "search": "1", "tool_call": "1"}
                    save(session, clock, PriceDraft(model, rates, clock.now()))

            def _status(model: str, cap: str) -> int:
                budget = {"cap": cap, "name": f"{model}-{cap}", "window": "total"}
                path = f"{gateway.url}/admin/v1/budgets"
                begun = httpx.post(path, json=budget, headers=gateway.headers).json()
                gateway.services.prices.refresh()
                gateway.services.prices._money.clear()
                body = {
                    "model": model,
                    "messages": [{"role": "user", "content": "Hi"}],
                    "max_tokens": 8,
                }
                url = f"{gateway.url}/v1/chat/completions"
                answer = httpx.post(url, json=body, headers=gateway.headers, timeout=60)
                httpx.delete(f"{path}/{begun['id']}", headers=gateway.headers)
                return answer.status_code

            assert _status("held", "5.99") in (402, 429)
            assert not server.asked
            assert _status("free", "5.99") == 200
            assert _status("held", "6.01") == 200 and len(server.asked) == 2


def test_of_several_entries_the_most_is_held() -> None:
    entries = [Upstream("http://a", most_searches=2), Upstream("http://b", most_tool_calls=3)]
    bound = _bound(entries)
    assert bound is not None and [count for _, count in bound.parts] == [2, 3]
    assert _bound([Upstream("http://a")]) is None
