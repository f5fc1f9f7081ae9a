"""What the ledger charges is what the counters keep, for every ending of a request."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import REGISTRY

from core.clock import SystemClock
from core.tenants import keys, limits
from core.tenants.organisations import create_project, create_tenant
from core.tenants.plans import DAY, LimitRule, Scope, Unit
from core.tenants.scope import scope_of_operator
from tests.gateway.deployment import MODEL, Deployment, running_deployment

CLOCK = SystemClock()


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Deployment]:
    """An engine that takes longer for a token than a client waits."""
    with running_deployment(tmp_path, token_delay_s=0.3) as deployment:
        yield deployment


def key_with(deployment: Deployment, *rules: LimitRule) -> str:
    with deployment.services.database.transaction() as session:
        tenant = create_tenant(session, CLOCK, name="limited")
        scope = scope_of_operator(tenant.id)
        project = create_project(session, scope, CLOCK, name="default").id
        for rule in rules:
            limits.set_rule(session, scope, CLOCK, rule)
        return keys.issue(session, scope, CLOCK, project_id=project, name="k").secret


def ask(deployment: Deployment, key: str, *, stream: bool = False) -> httpx.Response:
    body = {
        "model": MODEL,
        "max_tokens": 5,
        "stream": stream,
        "messages": [{"role": "user", "content": "hello"}],
    }
    headers = {"authorization": f"Bearer {key}", "x-request-timeout-ms": "150"}
    url = f"{deployment.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_time_out_are_free_and_use_up_the_limits_of_requests(
    slow: Deployment, stream: bool
) -> None:
    key = key_with(slow, LimitRule(Scope.TENANT, Unit.REQUESTS, 5, DAY))
    answers = [ask(slow, key, stream=stream) for _ in range(8)]
    assert [answer.status_code for answer in answers] == [503] * 5 + [429] * 3
    events = slow.events(5)
    assert len(events) == 5
    assert all(event["input_tokens"] == event["output_tokens"] == 0 for event in events)


def _rejections() -> dict[str, float]:
    (metric,) = [m for m in REGISTRY.collect() if m.name == "tollhouse_rejections"]
    return {s.labels["reason"]: s.value for s in metric.samples if s.name.endswith("_total")}


def test_a_rejected_request_is_counted_once_under_one_reason(slow: Deployment) -> None:
    key = key_with(slow, LimitRule(Scope.KEY, Unit.REQUESTS, 1, DAY))
    before = _rejections()
    assert [ask(slow, key).status_code for _ in range(3)] == [503, 429, 429]
    after = _rejections()
    added = {reason: n - before.get(reason, 0) for reason, n in after.items()}
    assert {reason: n for reason, n in added.items() if n} == {
        "deadline_exceeded": 1,
        "key:requests:86400": 2,
    }
