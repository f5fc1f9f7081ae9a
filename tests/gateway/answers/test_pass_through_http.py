"""Text that passes at once, over real sockets: what the client reads and what it pays."""

import asyncio
import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from gateway.answers.pass_through import PassThrough
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.scripted_upstream import WORD, Plan, ScriptedUpstream


@pytest.fixture(scope="module")
def unguarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    loop, server = asyncio.new_event_loop(), ScriptedUpstream()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    url = asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    settings = {
        "upstreams": json.dumps([{"url": url, "name": "u", "model": MODEL}]),
        "moderation": "off",
    }
    with running_deployment(
        tmp_path_factory.mktemp("unguarded"), settings=settings, engines=None
    ) as running:
        yield running
    asyncio.run_coroutine_threadsafe(server.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each piece that was offered was taken."""
    seen, take = list[bool](), PassThrough.take

    def _take(self: PassThrough, number: int, text: str, tokens: int) -> bool:
        seen.append(take(self, number, text, tokens))
        return seen[-1]

    monkeypatch.setattr(PassThrough, "take", _take)
    return seen


def body_of(plan: Plan, path: str) -> dict[str, object]:
    given = (
        {"messages": [{"role": "user", "content": str(plan)}]}
        if "chat" in path
        else {"prompt": str(plan)}
    )
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 200}
    return {"model": MODEL, **given, **options}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("piece", [0, 7])
def test_what_passes_is_whole_and_paid(
    unguarded: Deployment, passed: list[bool], path: str, piece: int
) -> None:
    plan = Plan(words=30, delay_ms=3, piece=piece)
    answer = httpx.post(
        unguarded.url + path, json=body_of(plan, path), headers=unguarded.headers, timeout=60
    )
    events = [
        json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")
    ]
    choices = [event["choices"][0] for event in events if event["choices"]]
    texts = [
        each["delta"].get("content") or "" if "chat" in path else each["text"] for each in choices
    ]
    assert "".join(texts) == WORD * 30 and choices[-1]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == plan.tokens
    assert {event["id"] for event in events} == {events[0]["id"]}
    event = unguarded.event(answer.headers["x-request-id"])
    assert (event["output_tokens"], event["waived_tokens"]) == (plan.tokens, 0)
    # The events of /v1/completions have no delta, and are read by the general parser.
    assert passed.count(True) > 15 if "chat" in path else not passed


def test_a_client_that_leaves_pays_what_it_got(unguarded: Deployment, passed: list[bool]) -> None:
    plan = Plan(words=400, delay_ms=10)
    path = "/v1/chat/completions"
    body = body_of(plan, path) | {"max_tokens": 2_000}
    read = 0
    with httpx.stream(
        "POST", unguarded.url + path, json=body, headers=unguarded.headers, timeout=60
    ) as answer:
        for line in answer.iter_lines():
            read += line.startswith("data: {")
            if read == 20:
                break
        request_id = answer.headers["x-request-id"]
    event = unguarded.event(request_id)
    assert event["status"] == 499 and passed.count(True) >= 15
    assert 0 < event["output_tokens"] < plan.tokens / 2
