"""Every surface in front of every provider: right, or refused by the parameter's name."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.engines.ports.answers import (
    CALLS,
    MADE,
    SIGNATURE,
    TEXT,
    THOUGHT,
    Made,
    end_rest,
)
from tests.gateway.provider_server import Provider, Said, provider

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SURFACES = (CHAT, MESSAGES, RESPONSES)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def server() -> Iterator[Provider]:
    with provider() as made:
        yield made


@pytest.fixture(scope="module")
def gateway(server: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    listed = [
        {
            "url": server.url,
            "provider": each.name,
            "name": each.name,
            "model": f"our-{each.name}",
            "upstream_model": each.model,
            "api_key": "k-theirs",
            "options": each.options,
        }
        for each in MADE.values()
    ]
    settings = {"upstreams": json.dumps(listed)}
    path = tmp_path_factory.mktemp("matrix")
    with running_deployment(path, settings=settings, engines=None) as made:
        with made.services.database.transaction() as session:
            for entry in listed:
                ensure_default_prices(session, SystemClock(), str(entry["model"]))
        made.services.prices.refresh()
        yield made


def body_of(
    surface: str, made: Made, turns: list[Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A question with a tool, on one surface."""
    asked = turns or [{"role": "user", "content": "Weather?"}]
    body: dict[str, Any] = {"model": f"our-{made.name}"}
    if surface == RESPONSES:
        tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
        include = ["reasoning.encrypted_content"]
        return {**body, "input": asked, "tools": [tool], "include": include, **more}
    if surface == MESSAGES:
        tools = [{"name": "weather", "input_schema": SCHEMA}]
        return {**body, "messages": asked, "tools": tools, "max_tokens": 2_000, **more}
    function = {"name": "weather", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    if more.get("stream"):
        more["stream_options"] = {"include_usage": True}
    return {**body, "messages": asked, "tools": tools, **more}


def post(gateway: Deployment, surface: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(gateway.url + surface, json=body, headers=gateway.headers, timeout=60)


class Read:
    """What a client reads of an answer: its texts, its calls, its turn as it is sent back."""

    def __init__(self, surface: str, answer: dict[str, Any]) -> None:
        self.surface = surface
        self.text = self.thought = ""
        self.calls: list[tuple[str, Any]] = []
        self.usage = answer["usage"]
        if surface == CHAT:
            message = answer["choices"][0]["message"]
            self.text, self.thought = (
                message["content"] or "",
                message.get("reasoning_content") or "",
            )
            self.calls = [
                (each["id"], json.loads(each["function"]["arguments"]))
                for each in message.get("tool_calls") or ()
            ]
            named = ("role", "content", "tool_calls", "reasoning_details")
            self.turn: list[Any] = [{k: message[k] for k in named if message.get(k)}]
            self.results = [
                {"role": "tool", "tool_call_id": call, "content": "sun"} for call, _ in self.calls
            ]
        elif surface == MESSAGES:
            for block in answer["content"]:
                self.text += block.get("text", "")
                self.thought += block.get("thinking", "")
                if block["type"] == "tool_use":
                    self.calls.append((block["id"], block["input"]))
            self.turn = [{"role": "assistant", "content": answer["content"]}]
            results = [
                {"type": "tool_result", "tool_use_id": call, "content": "sun"}
                for call, _ in self.calls
            ]
            self.results = [{"role": "user", "content": results}]
        else:
            for item in answer["output"]:
                for part in item.get("content") or ():
                    if item["type"] == "message":
                        self.text += part["text"]
                    else:
                        self.thought += part["text"]
                if item["type"] == "function_call":
                    self.calls.append((item["call_id"], json.loads(item["arguments"])))
            self.turn = answer["output"]
            self.results = [
                {"type": "function_call_output", "call_id": call, "output": "sun"}
                for call, _ in self.calls
            ]

    @property
    def counts(self) -> tuple[int, int, int]:
        """All input, what was read of a cache, and output."""
        usage = self.usage
        if self.surface == MESSAGES:
            read, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
            return usage["input_tokens"] + read + written, read, usage["output_tokens"]
        if self.surface == RESPONSES:
            read = usage["input_tokens_details"]["cached_tokens"]
            return usage["input_tokens"], read, usage["output_tokens"]
        read = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], read, usage["completion_tokens"]


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def joined(surface: str, text: str) -> dict[str, Any]:
    """The whole answer of a stream, put together as clients do."""
    events = events_of(text)
    if surface == RESPONSES:
        assert events[-1]["type"] == "response.completed", text
        found: dict[str, Any] = events[-1]["response"]
        return found
    if surface == MESSAGES:
        content: list[dict[str, Any]] = []
        written: dict[int, str] = {}
        usage: Any = None
        for event in events:
            if event["type"] == "content_block_start":
                content.append(dict(event["content_block"]))
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], content[event["index"]]
                for name in ("text", "thinking", "signature"):
                    if name in delta:
                        block[name] = block.get(name, "") + delta[name]
                if "partial_json" in delta:
                    written[event["index"]] = (
                        written.get(event["index"], "") + delta["partial_json"]
                    )
            elif event["type"] == "message_delta":
                usage = event["usage"]
        for index, arguments in written.items():
            content[index]["input"] = json.loads(arguments)
        return {"content": content, "usage": usage}
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    for event in events:
        for choice in event["choices"]:
            for name, value in choice["delta"].items():
                if name in ("content", "reasoning_content"):
                    message[name] += value or ""
                elif name == "reasoning_details":
                    message[name] = message.get(name, []) + value
                elif name == "tool_calls":
                    calls = [{k: v for k, v in each.items() if k != "index"} for each in value]
                    message[name] = message.get(name, []) + calls
    return {"choices": [{"message": message}], "usage": events[-1]["usage"]}


@pytest.mark.parametrize("size", [None, 0, 13])
@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("name", MADE)
def test_an_answer_goes_round(
    gateway: Deployment, server: Provider, name: str, surface: str, size: int | None
) -> None:
    """Text, reasoning and parallel calls arrive; their turn goes back with its signature."""
    made = MADE[name]
    server.said = made.whole(True) if size is None else made.stream(True, size)
    answer = post(gateway, surface, body_of(surface, made, stream=size is not None))
    assert answer.status_code == 200, answer.text
    read = Read(surface, answer.json() if size is None else joined(surface, answer.text))
    assert read.text == TEXT
    assert read.thought == (THOUGHT if made.reasons else "")
    assert [arguments for _, arguments in read.calls] == [each for _, each in CALLS]
    expected = made.usage
    assert read.counts == (expected.prompt, expected.read, expected.output)
    event = gateway.event(answer.headers["x-request-id"])
    counted = (event["input_tokens"], event["cached_tokens"], event["output_tokens"])
    assert (*counted, event["counted_by"]) == (*read.counts, "upstream")

    server.said = made.whole(False)
    question = {"role": "user", "content": "Weather?"}
    back = body_of(surface, made, [question, *read.turn, *read.results])
    assert post(gateway, surface, back).status_code == 200
    sent = server.last.raw.decode()
    assert (SIGNATURE in sent) is made.signs, sent
    assert sent.count("sun") == 2
    assert sent.index("Bern") < sent.index("sun")
    for _, arguments in CALLS:
        assert arguments["city"] in json.dumps(server.last.body, ensure_ascii=False)


@pytest.mark.parametrize("name", MADE)
def test_the_key_is_in_the_providers_own_header(
    gateway: Deployment, server: Provider, name: str
) -> None:
    server.said = MADE[name].whole(False)
    post(gateway, CHAT, body_of(CHAT, MADE[name]))
    held = [k for k, v in server.last.headers.items() if "k-theirs" in v]
    own = {"anthropic": "x-api-key", "gemini": "x-goog-api-key", "azure": "api-key"}
    assert held == [own.get(name, "authorization")]


SAMPLING = ("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty", "stop", "n")
VALUES: dict[str, Any] = {
    "temperature": 0.25,
    "top_p": 0.75,
    "seed": 77,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "stop": ["HALT"],
    "n": 2,
    "logit_bias": {"55": 7},
    "min_p": 0.125,
    "logprobs": True,
    "reasoning_effort": "low",
    "top_k": 33,
    "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}},
}
MARKS = {"stop": "halt", "logit_bias": "55", "response_format": "city", "n": "2"}


@pytest.mark.parametrize("parameter", VALUES)
@pytest.mark.parametrize("name", MADE)
def test_a_parameter_is_sent_or_refused_by_name(
    gateway: Deployment, server: Provider, name: str, parameter: str
) -> None:
    made, value = MADE[name], VALUES[parameter]
    server.said = made.whole(False)
    before = len(server.asked)
    body = body_of(CHAT, made, **{parameter: value})
    del body["tools"]
    answer = post(gateway, CHAT, body)
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == parameter
        assert len(server.asked) == before
        return
    assert answer.status_code == 200 or parameter == "n", answer.text  # it answers with one alone
    plain = body_of(CHAT, made)
    del plain["tools"]
    sent = server.last.body
    server.said = made.whole(False)
    post(gateway, CHAT, plain)
    assert sent != server.last.body, "it was dropped"
    mark = MARKS.get(parameter, str(value).lower())
    if parameter != "reasoning_effort":
        assert mark in json.dumps(sent).lower() or parameter == "logprobs"


def media_body(surface: str, made: Made, kind: str) -> dict[str, Any]:
    pdf = "data:application/pdf;base64,JVBERi0x"
    image = f"data:image/png;base64,{PNG}"
    if surface == MESSAGES:
        source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0x"}
        if kind == "image":
            source = {"type": "base64", "media_type": "image/png", "data": PNG}
        part: dict[str, Any] = {
            "type": "document" if kind == "document" else "image",
            "source": source,
        }
    elif surface == RESPONSES:
        part = {"type": "input_image", "image_url": image}
        if kind == "document":
            part = {"type": "input_file", "file_data": pdf, "filename": "a.pdf"}
    else:
        part = {"type": "image_url", "image_url": {"url": image}}
        if kind == "document":
            part = {"type": "file", "file": {"file_data": pdf, "filename": "a.pdf"}}
    return body_of(surface, made, [{"role": "user", "content": [part]}])


@pytest.mark.parametrize("kind", ["image", "document"])
@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("name", MADE)
def test_media_are_sent_or_refused_by_name(
    gateway: Deployment, server: Provider, name: str, surface: str, kind: str
) -> None:
    server.said = MADE[name].whole(False)
    answer = post(gateway, surface, media_body(surface, MADE[name], kind))
    if answer.status_code == 400:
        assert "content[0]" in answer.json()["error"]["message"]
        return
    assert answer.status_code == 200, answer.text
    assert (PNG if kind == "image" else "JVBERi0x") in server.last.raw.decode()


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("name", MADE)
def test_a_choice_of_tools_is_sent(
    gateway: Deployment, server: Provider, name: str, choice: Any
) -> None:
    made = MADE[name]
    server.said = made.whole(True)
    assert post(gateway, CHAT, body_of(CHAT, made)).status_code == 200
    plain = server.last.body
    answer = post(gateway, CHAT, body_of(CHAT, made, tool_choice=choice))
    assert answer.status_code == 200, answer.text
    assert server.last.body != plain


BAD: dict[str, Said] = {
    "a page": Said(b"<html>gateway</html>", "text/html"),
    "nothing": Said(b""),
    "a list": Said(b"[]"),
    "an empty object": Said(b"{}"),
    "half of it": Said(b'{"candidates": [{"conte'),
    "a page of an error": Said(b"<html>bad gateway</html>", "text/html", 502),
    "busy": Said(b'{"message": "slow down"}', status=429, headers={"retry_after": "7"}),
    "overloaded": Said(b'{"error": {"message": "overloaded"}}', status=529),
    "no right": Said(b'{"error": {"message": "no"}}', status=401),
}


@pytest.mark.parametrize("fault", BAD)
@pytest.mark.parametrize("name", MADE)
def test_a_bad_answer_is_an_error_that_costs_nothing(
    gateway: Deployment, server: Provider, name: str, fault: str
) -> None:
    made = MADE[name]
    server.said = BAD[fault]
    answer = post(gateway, CHAT, body_of(CHAT, made))
    server.said = made.whole(False)  # so that no breaker opens
    end_rest(gateway, f"our-{name}")
    post(gateway, CHAT, body_of(CHAT, made))
    assert answer.status_code == (429 if fault == "busy" else 503), answer.text
    assert answer.headers["retry-after"] == ("7" if fault == "busy" else "1")
    event = gateway.event(answer.headers["x-request-id"])
    assert (event["input_tokens"], event["output_tokens"]) == (0, 0)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_a_stream_that_ends_early_is_said_and_billed_for_what_came(
    gateway: Deployment, server: Provider, name: str, *, cut: bool
) -> None:
    """`cut`: the connection breaks; else it ends as if all were well. The answer has its text."""
    made = MADE[name]
    said = made.stream(False, 0)
    raw = b"".join(said.body)
    half = raw.rindex(TEXT[-4:].encode()) + 60  # in the middle of what follows the text
    server.said = Said([raw[:half]], said.kind, cut=cut)
    answer = post(gateway, CHAT, body_of(CHAT, made, stream=True))
    text = answer.text
    server.said = made.whole(False)
    post(gateway, CHAT, body_of(CHAT, made))
    assert '"error"' in text
    assert "[DONE]" not in text
    event = gateway.event(answer.headers["x-request-id"])
    assert event["status"] >= 500
    assert event["output_tokens"] <= made.usage.output


def test_one_loop_serves_them_all_at_once(gateway: Deployment, server: Provider) -> None:
    async def ask(client: httpx.AsyncClient, made: Made) -> int:
        body = body_of(CHAT, made)
        return (
            await client.post(gateway.url + CHAT, json=body, headers=gateway.headers)
        ).status_code

    async def ask_all() -> list[int]:
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*[ask(client, each) for each in MADE.values()])

    def _by_path(asked: Any) -> Said:
        for made in sorted(MADE.values(), key=lambda each: -len(each.model)):
            if made.model in unquote(asked.path) or made.model in asked.raw.decode():
                return made.whole(False)
        raise AssertionError(asked.path)

    server.said = _by_path
    assert set(asyncio.run(ask_all())) == {200}
