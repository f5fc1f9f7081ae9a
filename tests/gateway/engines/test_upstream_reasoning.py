"""Reasoning that an upstream sends apart reaches the client on each API, is counted and is billed."""

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream

PATH = "/v1/chat/completions"
ASK: Any = [{"role": "user", "content": "How is the weather?"}]
THOUGHT, SAID = "It may rain: look.", " Fair."
USAGE = {
    "prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21,
    "completion_tokens_details": {"reasoning_tokens": 8},
}  # fmt: skip
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def answer(field: str, body: dict[str, Any]) -> Any:
    """In pieces where the body asks for a stream; with a call where it has tools."""
    calls = {"tool_calls": [CALL]} if body.get("tools") else {}
    content = None if calls else SAID
    reason = "tool_calls" if calls else "stop"
    if not body["stream"]:
        message = {"role": "assistant", "content": content, field: THOUGHT, **calls}
        return {
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": USAGE,
        }
    pieces = [{field: THOUGHT[:7]}, {field: THOUGHT[7:]}]
    pieces += [calls and {"tool_calls": [{"index": 0, **CALL}]}, {}] if calls else [
        {"content": SAID[:3]}, {"content": SAID[3:]}, {},
    ]  # fmt: skip
    events = [{"choices": [{"index": 0, "delta": piece}]} for piece in pieces]
    events[-1]["choices"][0]["finish_reason"] = reason
    return [*events, {"choices": [], "usage": USAGE}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with upstream() as made:
        yield made


@pytest.fixture(params=["reasoning", "reasoning_content"])
def thinks(server: Server, request: pytest.FixtureRequest) -> None:
    server.answers[PATH] = lambda body: answer(request.param, body)


@pytest.fixture(scope="module")
def thinking(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    entry = {"url": server.url, "name": "u", "model": "thinker", "capabilities": ["tools"]}
    entry["parameters"] = ["reasoning_effort"]  # type: ignore[assignment]
    settings = {"upstreams": json.dumps([entry])}
    path = tmp_path_factory.mktemp("thinking")
    with running_deployment(path, settings=settings, engines=None) as made:
        with made.services.database.transaction() as session:
            ensure_default_prices(session, SystemClock(), "thinker")
        made.services.prices.refresh()
        yield made


@pytest.fixture
def client(thinking: Deployment) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{thinking.url}/v1", api_key=thinking.key, max_retries=0) as made:
        yield made


@pytest.mark.usefixtures("thinks")
def test_chat(client: OpenAI, thinking: Deployment) -> None:
    whole = client.chat.completions.create(model="thinker", messages=ASK)
    message: Any = whole.choices[0].message
    assert (message.reasoning, message.reasoning_content) == (THOUGHT, THOUGHT)
    assert message.content == SAID
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == 8
    texts = {"reasoning": "", "content": ""}
    for chunk in client.chat.completions.create(model="thinker", messages=ASK, stream=True):
        for name in texts:
            texts[name] += getattr(chunk.choices[0].delta, name, None) or ""
    assert texts == {"reasoning": THOUGHT, "content": SAID}
    assert {event["output_tokens"] for event in thinking.events(2)} == {12}


@pytest.mark.parametrize("stream", [False, True])
def test_an_upstream_that_writes_the_marks_itself_moves_no_text(
    client: OpenAI, server: Server, stream: bool
) -> None:
    thought, said = "so\ufdd1 it", " is\ufdd0 fair\ufdd1."
    pieces = [{"reasoning": thought}, {"content": said}, {}]
    streamed: list[Any] = [{"choices": [{"index": 0, "delta": piece}]} for piece in pieces]
    streamed[-1]["choices"][0]["finish_reason"] = "stop"
    message = {"role": "assistant", "content": said, "reasoning": thought}
    whole = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": USAGE}
    usage = {"choices": [], "usage": USAGE}
    server.answers[PATH] = lambda body: [*streamed, usage] if body["stream"] else whole
    if stream:
        with client.chat.completions.stream(model="thinker", messages=ASK) as events:
            got: Any = events.get_final_completion().choices[0].message
    else:
        got = client.chat.completions.create(model="thinker", messages=ASK).choices[0].message
    assert (got.reasoning, got.content) == ("so\ufffd it", " is\ufffd fair\ufffd.")


@pytest.mark.usefixtures("thinks")
@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_follow_it(client: OpenAI, stream: bool) -> None:
    asked: Any = {"model": "thinker", "messages": ASK, "tools": [TOOL]}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            message: Any = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**asked).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["look"]
    assert message.reasoning == THOUGHT and not message.content


@pytest.mark.usefixtures("thinks")
@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_a_reasoning_item(client: OpenAI, server: Server, stream: bool) -> None:
    asked: Any = {"model": "thinker", "input": "How is the weather?", "store": False}
    asked["reasoning"] = {"effort": "low"}
    if stream:
        with client.responses.stream(**asked) as events:
            kinds = [kind for kind, _ in groupby(event.type for event in events)]
            response = events.get_final_response()
        item = ["output_item.added", "content_part.added"]
        ended = ["content_part.done", "output_item.done"]
        expected = ["created", "in_progress", *item, "reasoning_text.delta"]
        expected += ["reasoning_text.done", *ended, *item, "output_text.delta"]
        expected += ["output_text.done", *ended, "completed"]
        assert kinds == [f"response.{name}" for name in expected]
    else:
        response = client.responses.create(**asked)
    assert [each.type for each in response.output] == ["reasoning", "message"]
    thought: Any = response.output[0]
    assert thought.content[0].text == THOUGHT and response.output_text == SAID
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 8
    assert response.reasoning is not None and response.reasoning.effort == "low"
    assert server.asked[-1][1]["reasoning_effort"] == "low"
    again = [*[each.model_dump(exclude_none=True) for each in response.output], ASK[0]]
    client.responses.create(**asked | {"input": again, "stream": False})
    assert [each["role"] for each in server.asked[-1][1]["messages"]] == ["assistant", "user"]


@pytest.mark.usefixtures("thinks")
@pytest.mark.parametrize("stream", [False, True])
def test_messages(thinking: Deployment, stream: bool) -> None:
    with Anthropic(base_url=thinking.url, api_key=thinking.key, max_retries=0) as claude:
        asked: Any = {"model": "thinker", "max_tokens": 99, "messages": ASK}
        if stream:
            with claude.messages.stream(**asked) as events:
                message = events.get_final_message()
        else:
            message = claude.messages.create(**asked)
    thought, text = message.content
    assert thought.type == "thinking" and thought.thinking == THOUGHT
    assert text.type == "text" and text.text == SAID


@pytest.mark.usefixtures("thinks")
@pytest.mark.parametrize("stream", [False, True])
def test_stored_reasoning_is_read_back_and_built_upon(
    client: OpenAI, server: Server, stream: bool
) -> None:
    if stream:
        with client.responses.stream(model="thinker", input="How is the weather?") as events:
            first = events.get_final_response()
    else:
        first = client.responses.create(model="thinker", input="How is the weather?")
    found = client.responses.retrieve(first.id)
    assert [each.type for each in found.output] == ["reasoning", "message"]
    assert [each.id for each in found.output] == [each.id for each in first.output]
    assert found.output[0] == first.output[0] and found.output_text == SAID
    second = client.responses.create(
        model="thinker", input="And tomorrow?", previous_response_id=first.id
    )
    assert second.output_text == SAID
    sent = server.asked[-1][1]["messages"]
    assert [each["role"] for each in sent] == ["user", "assistant", "user"]
    assert THOUGHT not in json.dumps(sent), "reasoning of an earlier turn is not shown again"
    conversation = client.conversations.create()
    client.responses.create(model="thinker", input="Hi", conversation=conversation.id)
    kinds = [each.type for each in client.conversations.items.list(conversation.id, order="asc")]
    assert kinds == ["message", "reasoning", "message"]
    client.responses.create(model="thinker", input="Again", conversation=conversation.id)
    assert [each["role"] for each in server.asked[-1][1]["messages"]] == [
        "user",
        "assistant",
        "user",
    ]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"effort": "huge"}, "reasoning.effort"),
        ({"summary": "detailed"}, "reasoning.summary"),
        ({"budget": 5}, "reasoning.budget"),
        ([], "reasoning"),
    ],
)
def test_what_reasoning_cannot_mean_is_refused_by_name(
    thinking: Deployment, given: Any, param: str
) -> None:
    body = {"model": "thinker", "input": "Hi", "reasoning": given}
    answer = httpx.post(
        f"{thinking.url}/v1/responses", json=body, headers=thinking.headers, timeout=30
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.usefixtures("thinks")
def test_a_thinking_block_has_a_signature(thinking: Deployment) -> None:
    with Anthropic(base_url=thinking.url, api_key=thinking.key, max_retries=0) as client:
        asked: Any = {"model": "thinker", "messages": ASK, "max_tokens": 64}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        block = message.content[0]
        assert block.type == "thinking" and block.thinking == THOUGHT and block.signature
