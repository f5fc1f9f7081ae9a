"""Streams of /v1/responses that the upstream breaks: what repeating them gives, and why it may be 503."""

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from core import idempotency
from core.clock import SystemClock
from core.tenants import keys
from core.tenants.organisations import create_project, create_tenant
from core.tenants.scope import scope_of_operator
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.scripted_upstream import Plan, ScriptedUpstream

BROKEN = ("cut", "error", "garbage")


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ScriptedUpstream, str]]:
    """The upstream and its address."""
    loop, server = asyncio.new_event_loop(), ScriptedUpstream()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server, asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    asyncio.run_coroutine_threadsafe(server.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def upstream(served: tuple[ScriptedUpstream, str]) -> ScriptedUpstream:
    return served[0]


@pytest.fixture
def reseller(
    served: tuple[ScriptedUpstream, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    entry = {"url": served[1], "name": "u", "model": MODEL}
    settings = {"upstreams": json.dumps([entry])}
    path = tmp_path_factory.mktemp("broken")
    with running_deployment(path, engines=None, settings=settings) as deployment:
        yield deployment


def ask(
    deployment: Deployment, ending: str, *, once: str = "", key: str = "", delay_ms: int = 0
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else dict(deployment.headers)
    if once:
        headers["idempotency-key"] = once
    body: dict[str, Any] = {
        "model": MODEL,
        "stream": True,
        "input": f"Tell me of the gate {Plan(words=4, delay_ms=delay_ms, ending=ending)}",
        "max_output_tokens": 40,
    }
    return httpx.post(f"{deployment.url}/v1/responses", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize("ending", BROKEN)
def test_who_repeats_a_broken_stream_at_once_runs_it_again(
    reseller: Deployment,
    upstream: ScriptedUpstream,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
) -> None:
    """The key is free before the client sees the end: no 409, and no broken stream is replayed."""
    swift = idempotency.release

    def _slow(*told: Any) -> None:
        time.sleep(0.3)
        swift(*told)

    monkeypatch.setattr(idempotency, "release", _slow)
    once, before = str(uuid.uuid4()), upstream.asked
    first, again = ask(reseller, ending, once=once), ask(reseller, ending, once=once)
    for answer in (first, again):
        assert answer.status_code == 200, answer.text
        assert "event: response.failed\n" in answer.text and "response.completed" not in answer.text
        assert "idempotency-replayed" not in answer.headers
    assert first.headers["x-request-id"] != again.headers["x-request-id"]
    assert upstream.asked == before + 2


@pytest.mark.parametrize("ending", BROKEN)
def test_a_response_that_failed_is_stored_with_what_it_has(
    reseller: Deployment, ending: str
) -> None:
    answer = ask(reseller, ending)
    last = json.loads(answer.text.strip().rpartition("\ndata: ")[2])
    assert last["type"] == "response.failed"
    failed = last["response"]
    assert failed["status"] == "failed" and failed["error"]["message"]
    assert failed["error"]["code"] == "server_error"
    (item,) = failed["output"]
    assert item["status"] == "incomplete" and item["content"][0]["text"].startswith("gate ")
    url = f"{reseller.url}/v1/responses/{failed['id']}"
    stored = httpx.get(url, headers=reseller.headers).json()
    assert (stored["status"], stored["error"]) == ("failed", failed["error"])
    assert stored["output"] == failed["output"]


def ask_at_once(deployment: Deployment, ending: str) -> list[httpx.Response]:
    """Three streams, each of which has its first token before any of them breaks."""
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda _: ask(deployment, ending, delay_ms=400), range(3)))


@pytest.mark.parametrize("ending", BROKEN)
def test_a_first_token_is_a_success_so_streams_that_break_in_turn_refuse_nobody(
    reseller: Deployment, ending: str
) -> None:
    for _ in range(5):
        assert "event: response.failed\n" in ask(reseller, ending).text
    assert "response.completed" in ask(reseller, "stop").text


@pytest.mark.parametrize("ending", BROKEN)
def test_streams_that_break_at_once_open_the_breaker_and_say_so(
    reseller: Deployment, upstream: ScriptedUpstream, ending: str
) -> None:
    assert all("event: response.failed\n" in each.text for each in ask_at_once(reseller, ending))
    once, before = str(uuid.uuid4()), upstream.asked
    refused = ask(reseller, "stop", once=once)
    assert refused.status_code == 503, refused.text
    assert refused.json()["error"]["code"] == "engine_unavailable"
    assert int(refused.headers["retry-after"]) >= 1
    assert upstream.asked == before, "an upstream behind an open breaker is not asked"
    deadline = time.monotonic() + 60
    while (answer := ask(reseller, "stop", once=once)).status_code == 503:
        assert answer.json()["error"]["code"] == "engine_unavailable"
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert answer.status_code == 200 and "response.completed" in answer.text, answer.text


def test_error_events_of_one_tenants_streams_refuse_no_other_tenant(reseller: Deployment) -> None:
    ask_at_once(reseller, "error")
    assert ask(reseller, "stop").status_code == 503
    clock = SystemClock()
    with reseller.services.database.transaction() as session:
        tenant = create_tenant(session, clock, name="other")
        scope = scope_of_operator(tenant.id)
        project = create_project(session, scope, clock, name="default").id
        other = keys.issue(session, scope, clock, project_id=project, name="k").secret
    answer = ask(reseller, "stop", key=other)
    assert answer.status_code == 200 and "response.completed" in answer.text
