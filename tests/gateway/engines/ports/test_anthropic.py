"""Anthropic's API behind every surface: SDKs on one side, a server made by hand on the other."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from core.errors import SettingError
from gateway.catalog.upstreams import read_upstreams
from gateway.formats.messages.request import parse_messages
from gateway.screening.prompt_texts import screened_texts
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.engines.ports.answers import end_rest
from tests.gateway.provider_server import Provider, Said, named_events, provider, whole

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SIGNATURE = "ErUBCkYIBxgCKkDq+signed/by=them=="
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USAGE = {
    "input_tokens": 12,
    "cache_read_input_tokens": 100,
    "cache_creation_input_tokens": 30,
    "cache_creation": {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 10},
    "output_tokens": 40,
}
CONTENT = [
    {"type": "thinking", "thinking": "Two cities.", "signature": SIGNATURE},
    {"type": "redacted_thinking", "data": "c2VhbGVk"},
    {"type": "text", "text": "I look at both."},
    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}},
    {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {"city": "Köln"}},
]
HEAD = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x"}


def message(content: list[dict[str, Any]], reason: str = "tool_use", **more: Any) -> dict[str, Any]:
    ending = {"stop_reason": reason, "stop_sequence": None}
    return {**HEAD, "content": content, **ending, "usage": USAGE, **more}


def events(content: list[dict[str, Any]], reason: str = "tool_use") -> list[dict[str, Any]]:
    """The same message as a stream, its texts in two pieces."""
    begun = {**USAGE, "output_tokens": 1}
    started = {**HEAD, "content": [], "stop_reason": None, "stop_sequence": None, "usage": begun}
    listed: list[dict[str, Any]] = [{"type": "message_start", "message": started}, {"type": "ping"}]
    for index, block in enumerate(content):
        empty, deltas = dict(block), []
        if block["type"] == "text":
            empty["text"] = ""
            half = len(block["text"]) // 2
            texts = (block["text"][:half], block["text"][half:])
            deltas = [{"type": "text_delta", "text": each} for each in texts]
        elif block["type"] == "thinking":
            empty |= {"thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        elif block["type"] == "tool_use":
            empty["input"] = {}
            written = json.dumps(block["input"])
            deltas = [
                {"type": "input_json_delta", "partial_json": each}
                for each in ("", written[:5], written[5:])
            ]
        listed.append({"type": "content_block_start", "index": index, "content_block": empty})
        listed += [
            {"type": "content_block_delta", "index": index, "delta": each} for each in deltas
        ]
        listed.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": reason, "stop_sequence": None}
    listed.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 40}})
    return [*listed, {"type": "message_stop"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Provider]:
    with provider() as made:
        yield made


@pytest.fixture(scope="module")
def gateway(server: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    entry = {"url": server.url, "provider": "anthropic", "api_key": "sk-theirs"}
    listed = [
        {**entry, "name": "a", "model": "claude", "upstream_model": "claude-sonnet-4-6"},
        {**entry, "name": "b", "model": "older", "upstream_model": "claude-sonnet-4-20250514"},
    ]
    settings = {"upstreams": json.dumps(listed)}
    path = tmp_path_factory.mktemp("anthropic")
    with running_deployment(path, settings=settings, engines=None) as made:
        with made.services.database.transaction() as session:
            for model in ("claude", "older"):
                ensure_default_prices(session, SystemClock(), model)
        made.services.prices.refresh()
        yield made


@pytest.fixture
def sdk(gateway: Deployment) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0)


@pytest.fixture
def openai_sdk(gateway: Deployment) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0)


TURNS: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {
                "type": "text",
                "text": "Weather?",
                "cache_control": {"type": "ephemeral", "ttl": "1h"},
            },
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
            {
                "type": "document",
                "source": {"type": "text", "media_type": "text/plain", "data": "a page"},
                "title": "Page",
                "citations": {"enabled": True},
            },
        ],
    },
    {"role": "assistant", "content": CONTENT},
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [
                    {"type": "text", "text": "sun"},
                    {
                        "type": "image",
                        "source": {"type": "url", "url": "https://x.example/sun.png"},
                    },
                ],
            },
            {
                "type": "tool_result",
                "tool_use_id": "toolu_2",
                "content": "no such city",
                "is_error": True,
            },
            {"type": "text", "text": "And now?"},
        ],
    },
]
BODY: dict[str, Any] = {
    "model": "claude",
    "max_tokens": 2_000,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": TURNS,
    "tools": [
        {
            "name": "weather",
            "description": "of a city",
            "input_schema": SCHEMA,
            "cache_control": {"type": "ephemeral"},
        }
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1_500},
    "stop_sequences": ["END"],
    "metadata": {"user_id": "u1"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
}


def test_a_message_reaches_the_provider_as_it_was_sent(
    sdk: anthropic.Anthropic, server: Provider
) -> None:
    server.said = whole(message(CONTENT))
    tuned = {"temperature": 1.0, "top_p": 0.95, "top_k": 40}  # which newer SDKs do not name
    sdk.messages.create(**BODY, extra_body=tuned)
    asked = server.last
    assert asked.path == "/v1/messages"
    assert asked.headers["x-api-key"] == "sk-theirs"
    assert asked.headers["anthropic-version"] == "2023-06-01"
    assert "authorization" not in asked.headers
    assert asked.body == {**BODY, **tuned, "model": "claude-sonnet-4-6"}


def test_a_whole_answer_comes_back_as_it_was_given(
    sdk: anthropic.Anthropic, server: Provider
) -> None:
    server.said = whole(message(CONTENT))
    got = sdk.messages.create(**{**BODY, "tool_choice": {"type": "auto"}}).to_dict()
    assert got["content"] == CONTENT
    assert got["stop_reason"] == "tool_use"
    assert got["usage"]["input_tokens"] == 12
    assert got["usage"]["cache_read_input_tokens"] == 100
    assert got["usage"]["cache_creation_input_tokens"] == 30
    assert got["usage"]["output_tokens"] == 40


@pytest.mark.parametrize("size", [0, 1, 7, 100])
def test_a_stream_comes_back_as_it_was_given(
    sdk: anthropic.Anthropic, server: Provider, size: int
) -> None:
    server.said = named_events(events(CONTENT), size)
    with sdk.messages.stream(**{**BODY, "tool_choice": {"type": "auto"}}) as stream:
        got = stream.get_final_message().to_dict()
    listed = [{k: v for k, v in block.items() if v is not None} for block in got["content"]]
    assert listed == CONTENT
    assert (got["stop_reason"], got["usage"]["output_tokens"]) == ("tool_use", 40)
    assert server.last.body["stream"] is True


def test_citations_and_stop_sequences_come_back(sdk: anthropic.Anthropic, server: Provider) -> None:
    cited = {
        "type": "char_location",
        "cited_text": "a page",
        "document_index": 0,
        "document_title": "Page",
        "start_char_index": 0,
        "end_char_index": 6,
    }
    content = [{"type": "text", "text": "It says so.", "citations": [cited]}]
    server.said = whole({**message(content, "stop_sequence"), "stop_sequence": "END"})
    got = sdk.messages.create(**BODY).to_dict()
    assert got["content"][0]["citations"] == [cited]
    assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", "END")


def test_a_chat_goes_round_with_signed_reasoning(
    openai_sdk: openai.OpenAI, server: Provider
) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    turns: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    for said in (whole(message(CONTENT)), named_events(events(CONTENT), 9)):
        server.said = said
        asked: dict[str, Any] = {"model": "claude", "messages": turns, "tools": tools}
        if said.kind == "application/json":
            answer = openai_sdk.chat.completions.create(**asked, reasoning_effort="low")
            choice = answer.choices[0]
            got = choice.message.to_dict()
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == 142
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == 100
            reason = choice.finish_reason
        else:
            got, reason = gathered(openai_sdk.chat.completions.create(**asked, stream=True))
        assert reason == "tool_calls"
        assert got["content"] == "I look at both."
        assert got["reasoning_content"] == "Two cities."
        assert [json.loads(c["function"]["arguments"]) for c in got["tool_calls"]] == [
            {"city": "Bern"},
            {"city": "Köln"},
        ]
        results = [
            {"role": "tool", "tool_call_id": c["id"], "content": "sun"} for c in got["tool_calls"]
        ]
        back = {
            "role": "assistant",
            **{k: got[k] for k in ("content", "tool_calls", "reasoning_details")},
        }
        server.said = whole(message([{"type": "text", "text": "Sun."}], "end_turn"))
        openai_sdk.chat.completions.create(
            model="claude", messages=[*turns, back, *results], tools=tools
        )
        sent = server.last.body["messages"]
        assert sent[1] == {"role": "assistant", "content": CONTENT}
        assert [each["tool_use_id"] for each in sent[2]["content"]] == ["toolu_1", "toolu_2"]


def gathered(stream: Any) -> tuple[dict[str, Any], str]:
    """A stream's message, put together as clients do."""
    got: dict[str, Any] = {
        "content": "",
        "reasoning_content": "",
        "tool_calls": [],
        "reasoning_details": [],
    }
    reason = ""
    for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta.to_dict()
            for name in ("content", "reasoning_content"):
                got[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or ():
                got["tool_calls"].append({k: v for k, v in call.items() if k != "index"})
            got["reasoning_details"] += delta.get("reasoning_details") or []
            reason = choice.finish_reason or reason
    return got, reason


def test_responses_go_round_with_encrypted_reasoning(
    openai_sdk: openai.OpenAI, server: Provider
) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    asked: dict[str, Any] = {
        "model": "claude",
        "tools": tools,
        "include": ["reasoning.encrypted_content"],
    }
    for stream in (False, True):
        server.said = named_events(events(CONTENT), 9) if stream else whole(message(CONTENT))
        if stream:
            with openai_sdk.responses.stream(**asked, input="Hi") as running:
                got = running.get_final_response().to_dict()
        else:
            got = openai_sdk.responses.create(**asked, input="Hi").to_dict()
        items = got["output"]
        assert [each["type"] for each in items] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]
        results = [
            {"type": "function_call_output", "call_id": each["call_id"], "output": "sun"}
            for each in items[2:]
        ]
        server.said = whole(message([{"type": "text", "text": "Sun."}], "end_turn"))
        begin: list[Any] = [{"role": "user", "content": "Hi"}]
        openai_sdk.responses.create(**asked, input=[*begin, *items, *results])
        assert server.last.body["messages"][1] == {"role": "assistant", "content": CONTENT}


@pytest.mark.parametrize("model", ["claude", "older"])
def test_an_effort_is_said_as_the_model_takes_it(
    gateway: Deployment, server: Provider, model: str
) -> None:
    server.said = whole(message([{"type": "text", "text": "hi"}], "end_turn"))
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Hi"}],
        "reasoning_effort": "medium",
    }
    answer = httpx.post(gateway.url + CHAT, json=body, headers=gateway.headers, timeout=60)
    assert answer.status_code == 200, answer.text
    sent = server.last.body
    if model == "claude":
        assert (sent["thinking"]["type"], sent["output_config"]) == (
            "adaptive",
            {"effort": "medium"},
        )
    else:
        assert sent["thinking"] == {"type": "enabled", "budget_tokens": 4096}
        assert "output_config" not in sent
    assert sent["max_tokens"] == 8192
    assert "max_tokens is 8192" in answer.headers["x-tollhouse-approximated"]


REFUSED: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "seed": 3,
    "logprobs": True,
    "logit_bias": {"5": 1},
    "n": 2,
    "temperature": 1.5,
    "min_p": 0.1,
    "response_format": {"type": "json_object"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_express_is_refused_by_name(
    gateway: Deployment, server: Provider, name: str
) -> None:
    count = len(server.asked)
    body = {"model": "claude", "messages": [{"role": "user", "content": "Hi"}], name: REFUSED[name]}
    answer = httpx.post(gateway.url + CHAT, json=body, headers=gateway.headers, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == name
    assert name in answer.json()["error"]["message"]
    assert len(server.asked) == count


def test_other_routes_are_refused_by_name(gateway: Deployment) -> None:
    body = {"model": "claude", "prompt": "Hi"}
    answer = httpx.post(
        gateway.url + "/v1/completions", json=body, headers=gateway.headers, timeout=60
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (
        404,
        "completions_not_supported",
    )


def error(kind: str, status: int, **headers: str) -> Said:
    detail = {"type": kind, "message": "max_tokens: it is wrong"}
    return whole({"type": "error", "error": detail, "request_id": "req_1"}, status, **headers)


@pytest.mark.parametrize(
    ("said", "status", "code", "wait"),
    [
        (error("invalid_request_error", 400), 400, "upstream_refused", None),
        (error("authentication_error", 401), 503, "engine_failed", "1"),
        (error("request_too_large", 413), 413, "payload_too_large", None),
        (error("rate_limit_error", 429, retry_after="7"), 429, "upstream_busy", "7"),
        (error("api_error", 500), 503, "engine_failed", "1"),
        (error("overloaded_error", 529), 503, "engine_failed", "1"),
        (Said(b"<html>gateway</html>", "text/html"), 503, "engine_unavailable", "1"),
        (Said(b"<html>bad gateway</html>", "text/html", 502), 503, "engine_failed", "1"),
        (Said(b'{"type":"message"}'), 503, "engine_unavailable", "1"),
        (Said(b"[]"), 503, "engine_unavailable", "1"),
    ],
)
def test_its_errors_are_ours(
    gateway: Deployment, server: Provider, said: Said, status: int, code: str, wait: str | None
) -> None:
    server.said = said
    body = {"model": "older", "messages": [{"role": "user", "content": "Hi"}]}
    answer = httpx.post(gateway.url + CHAT, json=body, headers=gateway.headers, timeout=60)
    server.said = whole(message(TEXT, "end_turn"))  # so that no breaker opens
    end_rest(gateway, "older")
    httpx.post(gateway.url + CHAT, json=body, headers=gateway.headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    assert answer.headers.get("retry-after") == wait
    assert "sk-theirs" not in answer.text
    if code == "upstream_refused":
        assert "max_tokens: it is wrong" in answer.json()["error"]["message"]


def streamed(gateway: Deployment, server: Provider, said: Said) -> tuple[str, dict[str, Any]]:
    """The text of a stream through the gateway, and the usage event."""
    server.said = said
    body = {"model": "claude", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    answer = httpx.post(gateway.url + CHAT, json=body, headers=gateway.headers, timeout=60)
    return answer.text, gateway.event(answer.headers["x-request-id"])


def test_a_stream_and_a_whole_answer_cost_the_same(gateway: Deployment, server: Provider) -> None:
    server.said = whole(message(CONTENT))
    body = {"model": "claude", "messages": [{"role": "user", "content": "Hi"}]}
    answer = httpx.post(gateway.url + CHAT, json=body, headers=gateway.headers, timeout=60)
    first = gateway.event(answer.headers["x-request-id"])
    _, second = streamed(gateway, server, named_events(events(CONTENT), 50))
    for event in (first, second):
        assert (event["input_tokens"], event["cached_tokens"], event["output_tokens"]) == (
            142,
            100,
            40,
        )
        assert event["counted_by"] == "upstream"


TEXT = [{"type": "text", "text": "one two three four"}]


@pytest.mark.parametrize(
    "fault", ["cut", "ends", "error", "unknown", "garbage", "no usage", "negative"]
)
def test_a_bad_stream_is_said_and_billed(gateway: Deployment, server: Provider, fault: str) -> None:
    listed = events(TEXT, "end_turn")
    said = named_events(listed)
    if fault in ("cut", "ends"):  # in the middle of an event, and of the answer
        raw = b"".join(said.body).partition(b'"content_block_stop"')[0]
        said = Said([raw], said.kind, cut=fault == "cut")
    elif fault == "error":
        overloaded = {"type": "overloaded_error", "message": "Overloaded"}
        said = named_events([*listed[:-3], {"type": "error", "error": overloaded}])
    elif fault == "unknown":
        said = named_events([*listed[:2], {"type": "new_thing", "x": 1}, *listed[2:]])
        said.body = [b"".join(said.body).replace(b'"end_turn"', b'"brand_new"')]
    elif fault == "garbage":
        raw = b"".join(named_events(listed[:-3]).body)
        said = Said([raw + b"data: {not json\n\n"], said.kind)
    elif fault == "no usage":
        said.body = [b"".join(said.body).replace(b'"usage"', b'"usages"')]
    elif fault == "negative":
        raw = b"".join(said.body).replace(b'"output_tokens": 40', b'"output_tokens": -40')
        said.body = [raw.replace(b'"input_tokens": 12', b'"input_tokens": -12')]
    text, event = streamed(gateway, server, said)
    assert "one two" in text
    assert "three four" in text
    whole_answer = fault in ("unknown", "no usage", "negative")
    assert ("[DONE]" in text) is whole_answer
    assert ('"error"' in text) is not whole_answer
    assert 0 < event["output_tokens"] <= 40
    assert (event["status"] == 200) is whole_answer
    if fault == "unknown":
        assert '"finish_reason":"stop"' in text


def test_entries_are_checked() -> None:
    def read(**fields: Any) -> Any:
        return read_upstreams(json.dumps([{"provider": "anthropic", "model": "m", **fields}]))

    assert read(api_key="k")[0].url == "https://api.anthropic.com"
    for fields, named in (
        ({}, "api_key"),
        ({"api_key": "k", "provider": "nobody"}, "nobody"),
        ({"api_key": "k", "options": {"colour": 1}}, "colour"),
        ({"api_key": "k", "options": []}, "options"),
        ({"api_key": "k", "engine": "vllm"}, "engine"),
    ):
        with pytest.raises(SettingError, match=named):
            read(**fields)
    with pytest.raises(SettingError, match="options"):
        read_upstreams('[{"url": "http://x", "options": {"a": 1}}]')


def test_a_document_of_text_is_screened_and_counted_as_text() -> None:
    asked = parse_messages(json.dumps(BODY).encode())
    assert any("a page" in each.text for each in screened_texts(asked))
    part = next(each for each in asked.messages[1]["content"] if "document" in each)  # type: ignore[index]
    assert part["document"] == {"title": "Page", "citations": {"enabled": True}}
    assert asked.engine_parameters["documents"] is True  # its answer is to cite it
