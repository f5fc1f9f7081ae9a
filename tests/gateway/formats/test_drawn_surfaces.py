"""Answers of upstreams with the liberties that real servers take, on every surface, whole and streamed,
as each SDK puts them together."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.drawn_answers import TOOLS, Drawn, draw
from tests.gateway.fake_upstream import Server, upstream

PROTECTS = (
    "gateway/formats",
    "gateway/engines/ports",
    "gateway/engines/openai.py",
    "gateway/answers",
)
PATH = "/v1/chat/completions"
Read = tuple[str, str, list[tuple[str, Any]], str]  # text, reasoning, calls, why it ended
ASK: Any = [{"role": "user", "content": "Hi"}]
NAMED = [each["function"] for each in TOOLS]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with upstream() as made:
        yield made


@pytest.fixture(scope="module")
def able(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder: Path = tmp_path_factory.mktemp("drawn")
    entry = {"url": server.url, "name": "u", "model": "able", "capabilities": ["tools"]}
    settings = {"upstreams": json.dumps([entry])}
    with running_deployment(folder, settings=settings, engines=None) as made:
        with made.services.database.transaction() as session:
            ensure_default_prices(session, SystemClock(), "able")
        made.services.prices.refresh()
        yield made


def chat(url: str, key: str, *, stream: bool) -> Read:
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        given: Any = {"model": "able", "messages": ASK, "tools": TOOLS}
        if stream:
            with client.chat.completions.stream(**given) as events:
                for _ in events:
                    continue
                choice: Any = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**given).choices[0]
    message = choice.message
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()]
    reasoning = getattr(message, "reasoning_content", None) or ""
    return (message.content or message.refusal or ""), reasoning, calls, choice.finish_reason


def messages(url: str, key: str, *, stream: bool) -> Read:
    with Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        tools: Any = [{"name": f["name"], "input_schema": f["parameters"]} for f in NAMED]
        given: Any = {"model": "able", "messages": ASK, "tools": tools, "max_tokens": 500}
        if stream:
            with client.messages.stream(**given) as events:
                final: Any = events.get_final_message()
        else:
            final = client.messages.create(**given)
    text = "".join(each.text for each in final.content if each.type == "text")
    thought = "".join(each.thinking for each in final.content if each.type == "thinking")
    calls = [(each.name, each.input) for each in final.content if each.type == "tool_use"]
    return text, thought, calls, final.stop_reason


def responses(url: str, key: str, *, stream: bool) -> Read:
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        tools: Any = [{"type": "function", "strict": False, **function} for function in NAMED]
        given: Any = {"model": "able", "input": "Hi", "tools": tools}
        if stream:
            with client.responses.stream(**given) as events:
                for _ in events:
                    continue
                final: Any = events.get_final_response()
        else:
            final = client.responses.create(**given)
    parts = [part for each in final.output if each.type == "message" for part in each.content]
    text = "".join(part.refusal if part.type == "refusal" else part.text for part in parts)
    thoughts = [each for each in final.output if each.type == "reasoning"]
    reasoning = "".join(part.text for each in thoughts for part in each.content or ())
    functions = [each for each in final.output if each.type == "function_call"]
    calls = [(each.name, json.loads(each.arguments)) for each in functions]
    return text, reasoning, calls, final.status


ENDS = {
    "chat": ("stop", "tool_calls", "stop"),
    "messages": ("end_turn", "tool_use", "refusal"),
    "responses": ("completed", "completed", "completed"),
}
SURFACES: list[Callable[..., Read]] = [chat, messages, responses]


def check(
    able: Deployment, server: Server, surface: Callable[..., Read], drawn: Drawn, seed: int
) -> None:
    plain, called, refused = ENDS[surface.__name__]
    ends = called if drawn.calls else refused if drawn.refusal else plain
    calls = [(name, arguments) for _, name, arguments in drawn.calls]
    meant = (drawn.text + drawn.refusal, drawn.reasoning, calls, ends)
    for stream in (False, True):
        server.answers[PATH] = drawn.reads if stream else drawn.whole
        where = f"{surface.__name__} of seed {seed}, stream={stream}, {drawn.style}"
        assert surface(able.url, able.key, stream=stream) == meant, where


@pytest.mark.parametrize("surface", SURFACES)
def test_each_sdk_reads_what_the_upstream_means(
    able: Deployment, server: Server, surface: Callable[..., Read]
) -> None:
    for seed in range(12):
        check(able, server, surface, draw(seed), seed)


@pytest.mark.proof
@pytest.mark.parametrize("surface", SURFACES)
def test_each_sdk_reads_what_the_upstream_means_of_many(
    able: Deployment, server: Server, surface: Callable[..., Read]
) -> None:
    for seed in range(12, 200):
        check(able, server, surface, draw(seed), seed)


@pytest.mark.parametrize(("status", "said", "told"), [(429, "30", "30"), (503, "17", "17")])
def test_an_upstreams_retry_after_reaches_the_client(
    able: Deployment, server: Server, status: int, said: str, told: str
) -> None:
    server.answers[PATH] = {"error": {"message": "later"}}
    server.statuses[PATH], server.headers["Retry-After"] = status, said
    try:
        answer = httpx.post(
            able.url + PATH,
            json={"model": "able", "messages": ASK},
            headers={"authorization": f"Bearer {able.key}"},
        )
    finally:
        server.statuses.clear()
        server.headers.clear()
    assert (answer.status_code, answer.headers["retry-after"]) == (status, told)


def test_an_upstreams_model_has_the_time_since_it_is_served(able: Deployment) -> None:
    with OpenAI(base_url=f"{able.url}/v1", api_key=able.key, max_retries=0) as client:
        (model,) = [each for each in client.models.list() if each.id == "able"]
    assert abs(time.time() - model.created) < 600
