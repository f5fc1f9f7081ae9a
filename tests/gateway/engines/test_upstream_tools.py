"""Tool calls and forms that an upstream can do: passed on, read back, guarded and counted."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from core.settings import Settings
from gateway.catalog.upstreams import read_upstreams
from gateway.engines.clients import make_engines
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream

PATH = "/v1/chat/completions"
ASK: Any = [{"role": "user", "content": [{"type": "text", "text": "Hi", "rank": 1}]}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
USAGE = {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}
CALL = {
    "id": "call_theirs",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
}


def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def piece(index: int, arguments: str, **named: Any) -> dict[str, Any]:
    function = {"arguments": arguments, **({"name": "weather"} if named else {})}
    return {"tool_calls": [{"index": index, "function": function, **named}]}


STREAM = [
    chunk({"role": "assistant", "content": "Let me see. "}),
    chunk(piece(0, "", id="call_a", type="function")),
    chunk(piece(0, '{"city": ')),
    chunk(piece(0, '"Bern"}')),
    chunk(piece(1, '{"city": "Brig"}', id="call_b", type="function")),
    chunk({}, "tool_calls"),
    {"choices": [], "usage": USAGE},
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with upstream() as made:
        yield made


@pytest.fixture(scope="module")
def able_deployment(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    entry = {"url": server.url, "name": "u", "model": "able", "capabilities": ["tools", "json"]}
    path = tmp_path_factory.mktemp("able")
    settings = {"upstreams": json.dumps([entry])}
    engines = make_engines(
        Settings(data_dir=path),
        read_upstreams(settings["upstreams"]),
        lambda _receipt: None,
        lambda _name, _events: None,
    )
    with running_deployment(path, settings=settings, engines=engines) as made:
        with made.services.database.transaction() as session:
            ensure_default_prices(session, SystemClock(), "able")
        made.services.prices.refresh()
        yield made


@pytest.fixture
def able(able_deployment: Deployment) -> Iterator[OpenAI]:
    url = f"{able_deployment.url}/v1"
    with OpenAI(base_url=url, api_key=able_deployment.key, max_retries=0, timeout=60) as made:
        yield made


def test_a_whole_answers_calls_come_back_with_their_ids(
    able_deployment: Deployment, able: OpenAI, server: Server
) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    server.answers[PATH] = {"choices": [choice], "usage": USAGE}
    answer = able.chat.completions.create(
        model="able", messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    sent = server.asked[-1][1]
    assert sent["tool_choice"] == "required" and sent["parallel_tool_calls"] is False
    assert sent["messages"][0]["content"] == "Hi"  # what every server reads
    calls = answer.choices[0].message.tool_calls
    assert calls is not None and calls[0].id == "call_theirs"
    assert json.loads(calls[0].function.arguments) == {"city": "Bern"}
    assert answer.choices[0].finish_reason == "tool_calls"
    event = able_deployment.event(answer._request_id)
    assert (event["input_tokens"], event["output_tokens"], event["waived_tokens"]) == (7, 9, 0)


MARK = {"cache_control": {"type": "ephemeral"}}
MARKED_CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief.", **MARK},
        {"role": "user", "content": [{"type": "text", "text": "One", **MARK}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], **MARK},
        {"role": "tool", "tool_call_id": "call_theirs", "content": "dry", **MARK, "volatile": True},
    ],
    "tools": [TOOLS[0] | MARK],
}
MARKED_MESSAGES = {
    "system": [{"type": "text", "text": "Be brief.", **MARK}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "One", **MARK}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}, **MARK}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": "dry", **MARK}],
        },
    ],
    "tools": [{"name": "weather", "input_schema": {"type": "object"}, **MARK}],
    **MARK,
}


def keys_in(part: Any) -> set[str]:
    if isinstance(part, dict):
        return set(part).union(*map(keys_in, part.values()))
    return set().union(*map(keys_in, part)) if isinstance(part, list) else set()


@pytest.mark.parametrize(("path", "body"), [(PATH, MARKED_CHAT), ("/v1/messages", MARKED_MESSAGES)])
def test_hints_for_prompt_order_do_not_go_upstream(
    able_deployment: Deployment, server: Server, path: str, body: dict[str, Any]
) -> None:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "Hi"},
        "finish_reason": "stop",
    }
    server.answers[PATH] = {"choices": [choice], "usage": USAGE}
    answer = httpx.post(
        able_deployment.url + path,
        json={"model": "able", "max_tokens": 9} | body,
        headers=able_deployment.headers,
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    sent = server.asked[-1][1]
    assert len(sent["messages"]) == 4 and len(sent["tools"]) == 1
    assert keys_in(sent).isdisjoint({"cache_control", "volatile", "rank", "custom"})


def test_pieces_of_a_stream_become_whole_calls(able: OpenAI, server: Server) -> None:
    server.answers[PATH] = STREAM
    with able.chat.completions.stream(model="able", messages=ASK, tools=TOOLS) as stream:
        for _ in stream:
            continue
        final = stream.get_final_completion().choices[0]
    assert final.message.content == "Let me see. " and final.finish_reason == "tool_calls"
    calls = final.message.tool_calls
    assert calls is not None and [call.id for call in calls] == ["call_a", "call_b"]
    told = [json.loads(call.function.arguments)["city"] for call in calls]
    assert told == ["Bern", "Brig"]


def test_a_call_passes_the_guard_as_any_text(
    able_deployment: Deployment, able: OpenAI, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    moderator = able_deployment.services.pipeline.moderator
    plain, seen = moderator.guard, []

    def _guard(*given: Any, **named: Any) -> Any:
        made = plain(*given, **named)
        for each in made:
            feed = each.feed
            each.feed = lambda text, _feed=feed, **how: (seen.append(text), _feed(text, **how))[1]
        return made

    monkeypatch.setattr(moderator, "guard", _guard)
    server.answers[PATH] = STREAM
    able.chat.completions.create(model="able", messages=ASK, tools=TOOLS, stream=True).close()
    list(able.chat.completions.create(model="able", messages=ASK, tools=TOOLS, stream=True))
    assert "Bern" in "".join(seen) and "Brig" in "".join(seen)


def test_forms_pass_to_an_upstream_that_can(able: OpenAI, server: Server) -> None:
    message = {"role": "assistant", "content": '{"a": 1}'}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    server.answers[PATH] = {"choices": [choice], "usage": USAGE}
    schema: Any = {"name": "x", "schema": {"type": "object"}, "strict": True}
    form: Any = {"type": "json_schema", "json_schema": schema}
    answer = able.chat.completions.create(model="able", messages=ASK, response_format=form)
    assert answer.choices[0].message.content == '{"a": 1}'
    assert server.asked[-1][1]["response_format"] == form
    text: Any = {"format": {"type": "json_schema", **schema}}
    told = able.responses.create(model="able", input="Hi", text=text)
    assert told.output_text == '{"a": 1}'
    assert server.asked[-1][1]["response_format"] == form
    assert "strict" not in server.asked[-1][1]


def test_what_it_did_not_declare_is_refused(able: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        able.embeddings.create(model="able", input="x")
