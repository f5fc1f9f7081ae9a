"""Every answer, stream event and error as OpenAI's published document says."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from engine.demo.paths import MODEL_DIR
from gateway.catalog.codec.tokenizing import load_codec
from tests.gateway.deployment import MODEL, Deployment
from tests.openai_document import openai_document

CHAT = [{"role": "user", "content": "Hello, who are you?"}]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found = copy.deepcopy(openai_document())
    _allow_nulls(found)
    return found


def _allow_nulls(part: Any) -> None:
    """`nullable: true` is older than the rest of the document; JSON Schema knows null as a type."""
    if isinstance(part, dict):
        if part.get("nullable") is True and isinstance(part.get("type"), str):
            part["type"] = [part["type"], "null"]
            if "enum" in part:
                part["enum"] = [*part["enum"], None]
        for each in part.values():
            _allow_nulls(each)
    elif isinstance(part, list):
        for each in part:
            _allow_nulls(each)


def check(document: dict[str, Any], schema: str, value: Any) -> None:
    registry = Registry().with_resource(
        "urn:openai", Resource.from_contents(document, default_specification=_specification())
    )
    reference = {"$ref": f"urn:openai#/components/schemas/{schema}"}
    errors = list(Draft202012Validator(reference, registry=registry).iter_errors(value))
    assert not errors, f"{schema}: {errors[0].json_path}: {errors[0].message[:300]}"


def _specification() -> Any:
    from referencing.jsonschema import DRAFT202012

    return DRAFT202012


def post(deployment: Deployment, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{deployment.url}{path}", json=body, headers=deployment.headers, timeout=60)


def events(answer: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("path", "schema", "body"),
    [
        ("/v1/chat/completions", "CreateChatCompletionResponse", {"messages": CHAT}),
        (
            "/v1/chat/completions",
            "CreateChatCompletionResponse",
            {"messages": CHAT, "n": 2, "stop": ["zzz"]},
        ),
        ("/v1/completions", "CreateCompletionResponse", {"prompt": "Once"}),
        ("/v1/responses", "Response", {"input": "Hello"}),
        ("/v1/responses", "Response", {"input": "Hello", **LOGPROBS}),
        ("/v1/responses/input_tokens", "TokenCountsResource", {"input": "Hello"}),
        ("/v1/models", "ListModelsResponse", {}),
        (f"/v1/models/{MODEL}", "Model", {}),
    ],
)
def test_answers(
    document: dict[str, Any], deployment: Deployment, path: str, schema: str, body: dict[str, Any]
) -> None:
    if "models" in path:
        answer = httpx.get(f"{deployment.url}{path}", headers=deployment.headers)
    else:
        limit = "max_output_tokens" if "/responses" in path else "max_tokens"
        answer = post(deployment, path, {"model": MODEL, limit: 5, **body})
    assert answer.status_code == 200, answer.text
    check(document, schema, answer.json())


def test_chat_stream_chunks(document: dict[str, Any], deployment: Deployment) -> None:
    body = {
        "model": MODEL,
        "messages": CHAT,
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chunks = events(post(deployment, "/v1/chat/completions", body))
    assert len(chunks) > 2 and chunks[-1]["choices"] == []
    for chunk in chunks:
        # Null until the last, as the document's words say and its schema forgets.
        told = {k: v for k, v in chunk.items() if k != "usage" or v is not None}
        check(document, "CreateChatCompletionStreamResponse", told)


def test_completion_stream_chunks(document: dict[str, Any], deployment: Deployment) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 5, "stream": True}
    chunks = events(post(deployment, "/v1/completions", body))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    for chunk in chunks:
        # The document has one schema for answers and chunks; chunks before the last end nothing.
        chunk["choices"][0]["finish_reason"] = "length"
        check(document, "CreateCompletionResponse", chunk)


@pytest.mark.parametrize("more", [{}, LOGPROBS])
def test_response_stream_events(
    document: dict[str, Any], deployment: Deployment, more: dict[str, Any]
) -> None:
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 5, "stream": True, **more}
    found = events(post(deployment, "/v1/responses", body))
    assert found[-1]["type"] == "response.incomplete"
    for event in found:
        check(document, "ResponseStreamEvent", event)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "nothing", "messages": CHAT}, 404),
        ({"model": MODEL, "messages": []}, 400),
        ({"model": MODEL, "messages": CHAT, "temperature": 9}, 400),
        ({"model": MODEL, "messages": CHAT, "audio": {}}, 400),
    ],
)
def test_errors(
    document: dict[str, Any], deployment: Deployment, body: dict[str, Any], status: int
) -> None:
    answer = post(deployment, "/v1/chat/completions", body)
    assert answer.status_code == status
    check(document, "ErrorResponse", answer.json())


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}
CALLED = 'Look: <tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'


@pytest.fixture
def calling(deployment: Deployment) -> Iterator[None]:
    deployment.engine.script = load_codec(MODEL_DIR).encode(CALLED)
    yield
    deployment.engine.script = None


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_of_chats(
    document: dict[str, Any], deployment: Deployment, calling: None, stream: bool
) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    body = {"model": MODEL, "messages": CHAT, "tools": tools, "stream": stream}
    answer = post(deployment, "/v1/chat/completions", body)
    assert answer.status_code == 200 and "tool_calls" in answer.text
    schema = "CreateChatCompletionResponse"
    if stream:
        schema = "CreateChatCompletionStreamResponse"
    for each in events(answer) if stream else [answer.json()]:
        check(document, schema, each)


@pytest.mark.parametrize("stream", [False, True])
def test_function_calls_of_responses(
    document: dict[str, Any], deployment: Deployment, calling: None, stream: bool
) -> None:
    tools = [{"type": "function", "strict": False, **WEATHER}]
    answer = post(
        deployment,
        "/v1/responses",
        {"model": MODEL, "input": "Hello", "tools": tools, "stream": stream},
    )
    assert answer.status_code == 200 and "function_call" in answer.text
    for each in events(answer) if stream else [answer.json()]:
        check(document, "ResponseStreamEvent" if stream else "Response", each)


@pytest.mark.parametrize("given", ["a text", ["one", "two"], [{"type": "text", "text": "a part"}]])
def test_moderations(document: dict[str, Any], deployment: Deployment, given: Any) -> None:
    answer = post(
        deployment, "/v1/moderations", {"input": given, "model": "omni-moderation-latest"}
    )
    assert answer.status_code == 200, answer.text
    check(document, "CreateModerationResponse", answer.json())
    assert len(answer.json()["results"]) == (2 if given == ["one", "two"] else 1)
