"""The tool runners of the SDKs, before an upstream that calls a tool once: what each sends, and that it
comes to its end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, beta_tool
from openai import OpenAI

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream

PATH = "/v1/chat/completions"
USAGE = {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}
ASK: Any = [{"role": "user", "content": "Weather in Bern?"}]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
}


def answer(body: dict[str, Any]) -> Any:
    """A call, and once its output is there, words."""
    called = any(message["role"] == "tool" for message in body["messages"])
    said = {"content": "It is sunny."} if called else {"content": None, "tool_calls": [CALL]}
    message = {"role": "assistant", **said}
    reason = "stop" if called else "tool_calls"
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {"choices": [choice], "usage": USAGE}
    return [
        {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {"choices": [], "usage": USAGE},
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with upstream() as made:
        made.answers[PATH] = answer
        yield made


@pytest.fixture(scope="module")
def able(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder: Path = tmp_path_factory.mktemp("runners")
    entry = {"url": server.url, "name": "u", "model": "able", "capabilities": ["tools"]}
    with running_deployment(
        folder, settings={"upstreams": json.dumps([entry])}, engines=None
    ) as made:
        with made.services.database.transaction() as session:
            ensure_default_prices(session, SystemClock(), "able")
        made.services.prices.refresh()
        yield made


@beta_tool
def get_weather(city: str) -> str:
    """Weather.

    Args:
        city: Its name
    """
    return f"sunny in {city}"


def check_sent(server: Server, before: int) -> None:
    """The second request holds the call and its output, as every server of this API reads them."""
    first, second = [body for _, body in server.asked[before:]]
    assert [message["role"] for message in first["messages"]] == ["user"]
    user, called, output = second["messages"]
    assert user["role"] == "user" and called["role"] == "assistant"
    assert called["content"] is None and called.keys() == {"role", "content", "tool_calls"}
    (call,) = called["tool_calls"]
    assert call.keys() == {"id", "type", "function"} and call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}
    assert output["role"] == "tool" and output["tool_call_id"] == call["id"]
    assert "sunny" in str(output["content"])


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_runner_goes_on_without_a_thread(
    able: Deployment, server: Server, stream: bool
) -> None:
    before = len(server.asked)
    with Anthropic(base_url=able.url, api_key=able.key, max_retries=0) as client:
        asked: Any = {"model": "able", "max_tokens": 100, "messages": ASK, "tools": [get_weather]}
        if stream:
            runner: Any = client.beta.messages.tool_runner(**asked, stream=True)
            for events in runner:
                for _ in events:
                    continue
            final = events.get_final_message()
        else:
            final = client.beta.messages.tool_runner(**asked).until_done()
    assert final.content[0].text == "It is sunny."
    check_sent(server, before)


def test_a_thread_is_refused_with_what_the_sdk_reads(able: Deployment) -> None:
    with Anthropic(base_url=able.url, api_key=able.key, max_retries=0) as client:
        body: Any = {"thread": {"type": "create"}}
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(model="able", max_tokens=9, messages=ASK, extra_body=body)
    found: Any = caught.value.body
    assert found["error"]["details"]["error_code"] == "thread_unsupported_request"
    assert isinstance(found["error"]["details"]["unsupported"], list)


@pytest.mark.parametrize("surface", ["chat", "responses"])
def test_a_loop_of_openais_sdk(able: Deployment, server: Server, surface: str) -> None:
    """As its documentation writes it: what came back is sent again, unchanged."""
    before = len(server.asked)
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function: Any = {"name": "get_weather", "parameters": parameters}
    with OpenAI(base_url=f"{able.url}/v1", api_key=able.key, max_retries=0) as client:
        if surface == "chat":
            tools: Any = [{"type": "function", "function": function}]
            messages: Any = list(ASK)
            first: Any = client.chat.completions.create(
                model="able", messages=messages, tools=tools
            )
            message = first.choices[0].message
            (call,) = message.tool_calls
            output = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
            messages += [message, output]
            last: Any = client.chat.completions.create(model="able", messages=messages, tools=tools)
            assert last.choices[0].message.content == "It is sunny."
        else:
            tools = [{"type": "function", "strict": False, **function}]
            items: Any = list(ASK)
            first = client.responses.create(model="able", input=items, tools=tools)
            (item,) = first.output
            given = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
            items += [*first.output, given]
            last = client.responses.create(model="able", input=items, tools=tools)
            assert last.output_text == "It is sunny."
    check_sent(server, before)
