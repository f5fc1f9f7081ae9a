"""Images on /v1/messages and /v1/responses: passed to upstreams that declare them, or refused."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream

DATA = "iVBORw0KGgo="
PIXEL = f"data:image/png;base64,{DATA}"
SOURCE: Any = {"type": "base64", "media_type": "image/png", "data": DATA}
BLOCK: Any = {"type": "image", "source": SOURCE, "cache_control": {"type": "ephemeral"}}
TOOL: Any = {"name": "see", "input_schema": {"type": "object", "properties": {}}}
SEEN: Any = {"type": "image_url", "image_url": {"url": PIXEL}}
USAGE = {"prompt_tokens": 700, "completion_tokens": 2, "total_tokens": 702}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with upstream() as made:
        message = {"role": "assistant", "content": "a cat"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        made.answers["/v1/chat/completions"] = {"choices": [choice], "usage": USAGE}
        yield made


@pytest.fixture(scope="module")
def seeing(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    entry = {"url": server.url, "name": "u", "model": "seeing", "capabilities": ["images", "tools"]}
    path = tmp_path_factory.mktemp("seeing")
    with running_deployment(
        path, settings={"upstreams": json.dumps([entry])}, engines=None
    ) as made:
        with made.services.database.transaction() as session:
            ensure_default_prices(session, SystemClock(), "seeing")
        made.services.prices.refresh()
        yield made


def test_anthropics_images_reach_the_upstream(seeing: Deployment, server: Server) -> None:
    """Those of a tool's result in the message behind it, as in a chat tools answer in text."""
    url = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    messages: Any = [
        {"role": "user", "content": [BLOCK, {"type": "text", "text": "What is this?"}, url]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "see", "input": {}}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "text", "text": "taken"}, BLOCK],
                },
                {"type": "text", "text": "And now?"},
            ],
        },
    ]  # fmt: skip
    with Anthropic(base_url=seeing.url, api_key=seeing.key, max_retries=0) as client:
        answer = client.messages.create(
            model="seeing", messages=messages, max_tokens=20, tools=[TOOL]
        )
    assert answer.content[0].type == "text" and answer.content[0].text == "a cat"
    assert answer.usage.input_tokens == 700
    first, call, result, last = server.asked[-1][1]["messages"]
    text = {"type": "text", "text": "What is this?"}
    linked = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    assert first == {"role": "user", "content": [SEEN, text, linked]}
    assert call["tool_calls"][0]["function"]["name"] == "see"
    assert (result["role"], result["content"]) == ("tool", "taken")
    assert last == {"role": "user", "content": [SEEN, {"type": "text", "text": "And now?"}]}


def test_images_of_responses_reach_the_upstream(seeing: Deployment, server: Server) -> None:
    part: Any = {"type": "input_image", "image_url": PIXEL, "detail": "low"}
    content = [{"type": "input_text", "text": "What is this?"}, part]
    asked: Any = [{"role": "user", "content": content}]
    sent = {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}
    with OpenAI(base_url=f"{seeing.url}/v1", api_key=seeing.key, max_retries=0) as client:
        answer = client.responses.create(model="seeing", input=asked)
        assert answer.output_text == "a cat"
        wanted = [{"type": "text", "text": "What is this?"}, sent]
        assert server.asked[-1][1]["messages"] == [{"role": "user", "content": wanted}]
        client.responses.create(model="seeing", input="More?", previous_response_id=answer.id)
        assert server.asked[-1][1]["messages"][0] == {"role": "user", "content": wanted}
        made = client.conversations.create(items=[{"type": "message", **asked[0]}])
        client.responses.create(model="seeing", input="And?", conversation=made.id)
        assert server.asked[-1][1]["messages"][0] == {"role": "user", "content": wanted}


def test_images_of_a_functions_output_follow_it(seeing: Deployment, server: Server) -> None:
    """After the outputs of all calls of a turn, which a chat wants together."""
    calls: Any = [
        {"type": "function_call", "call_id": name, "name": "view_image", "arguments": "{}"}
        for name in ("a", "b")
    ]
    image: Any = {"type": "input_image", "image_url": PIXEL}
    outputs: Any = [
        {"type": "function_call_output", "call_id": "a", "output": [image]},
        {"type": "function_call_output", "call_id": "b", "output": "none"},
    ]
    with OpenAI(base_url=f"{seeing.url}/v1", api_key=seeing.key, max_retries=0) as client:
        client.responses.create(
            model="seeing", input=[{"role": "user", "content": "See"}, *calls, *outputs]
        )
        client.responses.create(
            model="seeing",
            input=[
                {"role": "user", "content": "See"},
                *calls,
                *outputs,
                {"role": "user", "content": "So?"},
            ],
        )  # fmt: skip
    for asked, last in ((server.asked[-2], []), (server.asked[-1], ["So?"])):
        _, call, first, second, *rest = asked[1]["messages"]
        assert [each["id"] for each in call["tool_calls"]] == ["a", "b"]
        assert [(each["role"], each["content"]) for each in (first, second)] == [
            ("tool", ""),
            ("tool", "none"),
        ]
        assert [each["content"] for each in rest] == [[SEEN], *last]


@pytest.mark.parametrize(
    "source",
    [
        {"type": "base64", "media_type": "text/html", "data": DATA},
        {"type": "base64", "data": DATA},
        {"type": "file", "file_id": "f"},
        {"type": "url", "url": "http://10.0.0.1/a.png"},
        {"type": "url", "url": 7},
        None,
    ],
)
def test_another_source_is_refused_by_name(seeing: Deployment, source: Any) -> None:
    asked: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with (
        Anthropic(base_url=seeing.url, api_key=seeing.key, max_retries=0) as client,
        pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].source"),
    ):
        client.messages.create(model="seeing", messages=asked, max_tokens=20)


def test_a_model_that_reads_text_refuses_images_by_name(
    deployment: Deployment, client: OpenAI
) -> None:
    result: Any = {"type": "tool_result", "tool_use_id": "t", "content": [BLOCK]}
    for block in (BLOCK, result):
        asked: Any = [{"role": "user", "content": [block]}]
        with Anthropic(base_url=deployment.url, api_key=deployment.key, max_retries=0) as other:
            for ask in (other.messages.create, other.messages.count_tokens):
                more: Any = {"max_tokens": 4} if ask == other.messages.create else {}
                with pytest.raises(anthropic.BadRequestError, match="is not text"):
                    ask(model=MODEL, messages=asked, **more)
    part: Any = {"type": "input_image", "image_url": PIXEL, "detail": "auto"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input=[{"role": "user", "content": [part]}])
    assert caught.value.param == "input[0].content[0]"
