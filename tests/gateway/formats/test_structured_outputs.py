"""Structured output and forced tools through the gateway, on the real engine, by the SDKs."""

import json
import re
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.gateway.deployment import MODEL, Deployment
from tests.gateway.own_engine import deployment_on_own_engine

PROTECTS = ("gateway/formats", "gateway/answers", "engine/decoding")

ASK: Any = [{"role": "user", "content": "What is a toll?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("structured")
    with deployment_on_own_engine(folder, num_blocks=512) as running:
        yield running


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{deployment.url}/v1", api_key=deployment.key, max_retries=2, timeout=60
    ) as one:
        one.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1)
        yield one


class Size(BaseModel):
    unit: Literal["cm", "m"]
    value: int


class Box(BaseModel):
    colour: Literal["red", "blue"]
    size: Size
    tags: Annotated[list[Literal["a", "b"]], Field(max_length=3)]


def test_the_sdk_parses_into_the_clients_own_type(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Box, max_tokens=300, seed=2
    )
    assert isinstance(answer.choices[0].message.parsed, Box)
    assert answer.choices[0].finish_reason == "stop"
    streamed: Any = None
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, response_format=Box, max_tokens=300, seed=2
    ) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == answer.choices[0].message.parsed
    response = client.responses.parse(
        model=MODEL, input="A box", text_format=Box, max_output_tokens=300
    )
    assert isinstance(response.output_parsed, Box)


def test_an_answer_cut_by_max_tokens_says_so(client: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Box, max_tokens=4)


def test_json_objects(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "additionalProperties": {"type": "integer", "maximum": 9, "minimum": 0},
        "maxProperties": 2,
    }
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=200, seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )  # fmt: skip
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=40, response_format={"type": "json_object"}
    )
    assert (answer.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("extra", "shape"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, r"[0-9]{3}-[a-f]{2}"),
        ({"structured_outputs": {"choice": ["north", "south"]}}, r"north|south"),
        ({"structured_outputs": {"grammar": 'root ::= ("yes" | "no") "!"'}}, r"(yes|no)!"),
        ({"structured_outputs": {"grammar": 'start: "yes" | "no"'}}, r"yes|no"),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, r"1|2"),
        ({"guided_regex": "a{2,3}"}, r"a{2,3}"),
        ({"guided_choice": ["up", "down"]}, r"up|down"),
        ({"guided_json": {"type": "boolean"}}, r"true|false"),
        ({"guided_grammar": 'root ::= "x" "y"'}, r"xy"),
    ],
)
def test_vllms_fields_on_chat_and_completions(
    client: OpenAI, extra: dict[str, Any], shape: str
) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=40, extra_body=extra
    )
    assert re.fullmatch(shape, chat.choices[0].message.content or "")
    text = client.completions.create(model=MODEL, prompt="a b", max_tokens=40, extra_body=extra)
    assert re.fullmatch(shape, text.choices[0].text)
    assert chat.choices[0].finish_reason == text.choices[0].finish_reason == "stop"


def arguments(call: Any) -> Any:
    parsed = json.loads(call.function.arguments)
    if call.function.name == "weather":
        jsonschema.validate(parsed, CITY)
    else:
        assert call.function.name == "now" and parsed == {}
    return parsed


def test_forced_tools(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": TOOLS, "max_tokens": 200}
    one = client.chat.completions.create(**ask, tool_choice="required", parallel_tool_calls=False)
    (call,) = one.choices[0].message.tool_calls or []
    arguments(call)
    assert one.choices[0].finish_reason == "tool_calls" and not one.choices[0].message.content
    several = client.chat.completions.create(**ask, tool_choice="required", seed=4)
    for call in several.choices[0].message.tool_calls or []:
        arguments(call)
    assert several.choices[0].message.tool_calls
    named: Any = {"type": "function", "function": {"name": "weather"}}
    forced = client.chat.completions.create(**ask, tool_choice=named)
    (call,) = forced.choices[0].message.tool_calls or []
    assert call.function.name == "weather" and arguments(call)["city"] in ("Oslo", "Rome")
    allowed: Any = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "now"}}],
        },
    }
    (call,) = (
        client.chat.completions.create(**ask, tool_choice=allowed).choices[0].message.tool_calls
        or []
    )
    assert call.function.name == "now"
    free = client.chat.completions.create(**{**ask, "max_tokens": 30}, tool_choice="auto")
    assert free.choices[0].message.content or free.choices[0].message.tool_calls


def test_forced_tools_on_responses_and_streams(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "strict": True, **TOOLS[0]["function"]}]
    answer = client.responses.create(
        model=MODEL, input="Weather?", tools=tools, tool_choice="required", max_output_tokens=200,
        parallel_tool_calls=False,
    )  # fmt: skip
    (item,) = answer.output
    assert item.type == "function_call" and item.name == "weather"
    jsonschema.validate(json.loads(item.arguments), CITY)
    text, name = "", ""
    for chunk in client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=200,
        parallel_tool_calls=False, stream=True,
    ):  # fmt: skip
        for call in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            assert call.function is not None
            name, text = name or (call.function.name or ""), text + (call.function.arguments or "")
    assert name in ("weather", "now") and isinstance(json.loads(text), dict)


def test_anthropics_tools(deployment: Deployment) -> None:
    client = Anthropic(base_url=deployment.url, api_key=deployment.key, max_retries=0)
    tools: Any = [{"name": "weather", "input_schema": CITY}]
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "weather"},
    ):
        message = client.messages.create(
            model=MODEL,
            max_tokens=200,
            messages=ASK,
            tools=tools,
            tool_choice=choice,  # type: ignore[arg-type]
        )
        (block,) = message.content
        assert block.type == "tool_use" and message.stop_reason == "tool_use"
        jsonschema.validate(block.input, CITY)
    message = client.messages.create(
        model=MODEL, max_tokens=200, messages=ASK,
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": CITY}}},
    )  # fmt: skip
    (text,) = message.content
    assert text.type == "text"
    jsonschema.validate(json.loads(text.text), CITY)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"not": {}}},
                }
            },
            "Unimplemented",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "has no schema",
        ),
        ({"guided_regex": "((("}, "unclosed group"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "one form only"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "one form only"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not supported"),
        ({"structured_outputs": {"regex": ""}}, "not empty"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "not among the tools",
        ),
    ],
)
def test_what_cannot_be_served_costs_nothing(
    deployment: Deployment, client: OpenAI, extra: dict[str, Any], said: str
) -> None:
    """Nor do grammars that no engine can serve: those of test_hostile_grammars.py."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=re.escape(said)) as caught:
            client.chat.completions.create(
                model=MODEL, messages=ASK, max_tokens=9, stream=stream, extra_body=extra
            )
        assert caught.value.status_code == 400
        request_id = caught.value.response.headers["x-request-id"]
        events = deployment.events(0, request_id=request_id)
        assert all(e["output_tokens"] == e["input_tokens"] == 0 for e in events)


@pytest.mark.proof
def test_a_slow_grammar_does_not_delay_a_neighbour(client: OpenAI) -> None:
    """While one tenant's grammar is tried for two seconds, other requests are answered."""
    refused: list[Exception] = []

    def slow() -> None:
        patterns = [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(10, 30)]
        try:
            client.chat.completions.create(
                model=MODEL, messages=ASK, extra_body={"guided_json": {"allOf": patterns}}
            )
        except openai.BadRequestError as error:
            refused.append(error)

    thread = threading.Thread(target=slow)
    thread.start()
    answered = 0
    while thread.is_alive():
        client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=2)
        answered += 1
    assert refused and answered >= 3
