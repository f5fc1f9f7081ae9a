"""Tool calls in what a model writes: found in every style, on every surface, streamed or whole."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from anthropic import Anthropic
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import OpenAI

from engine.demo.paths import MODEL_DIR
from gateway.answers.choices import ChoiceOutput
from gateway.answers.reasoning import OutputReader
from gateway.answers.tool_calls import ToolCall, ToolReader
from gateway.catalog.codec.tokenizing import load_codec
from gateway.request.engine import TextChunk
from tests.gateway.deployment import MODEL, Deployment

CALL = '{"name": "weather", "arguments": {"city": "Zürich \\"old\\""}}'
LLAMA = '{"name": "weather", "parameters": {"city": "Zürich \\"old\\""}}'
ARGUMENTS = {"city": 'Zürich "old"'}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
ASK = [{"role": "user", "content": "How is the weather?"}]


def read(text: str, size: int = 1) -> tuple[str, list[ToolCall]]:
    reader = ToolReader(["weather", "time"])
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    fed = [reader.feed(part) for part in parts] + [reader.flush()]
    return "".join(shown for shown, _ in fed), [call for _, calls in fed for call in calls]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
        (f"Let me look.\n<tool_call>{CALL}</tool_call>", "Let me look.\n", 1),
        (f"\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n", "", 2),
        (f"<tool_call>{CALL}</tool_call> Done.", " Done.", 1),
        (f"<tool_call>{CALL}", "", 1),
        (LLAMA, "", 1),
        (f" {LLAMA}; {LLAMA}", "", 2),
        (f"[{CALL}, {CALL}]", "", 2),
        ('{"type": "function", "function": {"name": "time"}}', "", 1),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", 0),
        ("a < b and <tool", "a < b and <tool", 0),
        ('{"answer": 42}', '{"answer": 42}', 0),
        ('{"name": "Ada", "arguments": {}}', '{"name": "Ada", "arguments": {}}', 0),
        ('{"name": "weather", "arguments": [1]}', '{"name": "weather", "arguments": [1]}', 0),
        (f"I would say {CALL}", f"I would say {CALL}", 0),
        ("  ", "  ", 0),
    ],
)
def test_styles(text: str, shown: str, calls: int, size: int) -> None:
    said, found = read(text, size)
    assert (said, len(found)) == (shown, calls)
    assert [call.index for call in found] == list(range(calls))
    assert len({call.id for call in found}) == calls
    for call in found:
        assert call.name in ("weather", "time")
        assert json.loads(call.arguments) == ({} if call.name == "time" else ARGUMENTS)


PIECES = [
    "<tool_call>",
    "</tool_call>",
    CALL,
    LLAMA,
    "{",
    "}",
    '"',
    "[",
    " ",
    "\n",
    ";",
    "x",
    "<to",
]


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.integers(1, 9))
def test_chunks_change_nothing_and_no_text_is_lost(text: str, size: int) -> None:
    whole, calls = read(text, 10_000)
    said, found = read(text, size)
    assert said == whole
    assert [c.arguments for c in found] == [c.arguments for c in calls]
    if not calls:
        assert whole == text


CUT = [
    ('<tool_call>\n{"name": "weather", "arguments": {"city": "Be', ['{"city": "Be'], ""),
    ('<tool_call>{"id": "c", "name": "weather", "arguments": {"a": 1}', ['{"a": 1}'], ""),
    ('<tool_call>{"name": "weather", "arguments": {"a": 1}}', ['{"a": 1}'], ""),
    ('<tool_call>{"name": "weather", "arguments": {"a": 1}}\n</tool', ['{"a": 1}'], ""),
    ('<tool_call>{"name": "weather", "arguments": ', [""], ""),
    ('<tool_call>{"name": "wea', [], ""),
    ("<tool_call>", [], ""),
    ("So: <tool_c", [], "So: <tool_c"),
    ('<tool_call>{"name": "other", "arguments": {"a', [], None),
]


@pytest.mark.parametrize(("text", "arguments", "shown"), CUT)
@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_that_is_cut_is_no_text(
    text: str, arguments: list[str], shown: str | None, size: int
) -> None:
    reader = ToolReader(["weather"])
    said, calls = "", []
    for at in range(0, len(text), size):
        more, found = reader.feed(text[at : at + size])
        said, calls = said + more, calls + found
    more, found = reader.flush(cut=True)
    assert [call.arguments for call in calls + found] == arguments
    assert said + more == (text if shown is None else shown)


def test_what_may_become_a_call_is_held_and_not_yet_delivered() -> None:
    codec = load_codec(MODEL_DIR)
    choice = ChoiceOutput(0, None, reader=OutputReader(ToolReader(["weather"])))
    choice.feed(TextChunk("r", 0, "Hm ", 1))
    choice.take()
    choice.sent()
    choice.feed(TextChunk("r", 0, "<tool_call>", 1))
    choice.feed(TextChunk("r", 0, CALL, 9))
    assert choice.take() is None
    choice.sent()
    assert choice.delivered == len("Hm ")
    choice.feed(TextChunk("r", 0, "</tool_call>", 1, "stop"))
    delta = choice.take()
    assert delta is not None and len(delta.calls) == 1 and delta.finish_reason == "tool_calls"
    choice.sent()
    assert choice.delivered == len(f"Hm <tool_call>{CALL}</tool_call>")
    assert codec.template is not None


@pytest.mark.parametrize(
    "text",
    [
        "[weather(city='Rome')]",
        "[weather(city='')]",
        '[{"name": "time"}]',
        LLAMA.replace("Zürich", "L'Aquila"),
    ],
)
def test_a_bare_call_is_known_at_its_last_bracket(text: str) -> None:
    """And not only at the end of the output."""
    said, calls = ToolReader(["weather", "time"]).feed(text)
    assert said == "" and len(calls) == 1


@pytest.mark.parametrize(
    ("given", "kept"), [('"call_7"', True), ('""', False), ("null", False), ("7", False)]
)
def test_a_call_has_the_id_that_the_model_gave_or_one_of_ours(given: str, kept: bool) -> None:
    _, (call,) = read(f'<tool_call>{{"name": "time", "id": {given}}}</tool_call>')
    assert (call.id == "call_7") is kept
    assert kept or (call.id.startswith("call_") and len(call.id) == len("call_") + 24)


def test_white_space_before_the_first_call_is_no_text() -> None:
    for size in (1, 100):
        assert read("\n [TOOL_CALLS]time[ARGS]{}", size)[0] == ""


def test_the_id_in_mistrals_form_is_kept() -> None:
    _, (call,) = read("[TOOL_CALLS]time[CALL_ID]abc123456[ARGS]{}")
    assert (call.id, call.name, call.arguments) == ("abc123456", "time", "{}")


@pytest.fixture
def says(deployment: Deployment) -> Iterator[Any]:
    codec = load_codec(MODEL_DIR)

    def _says(text: str) -> None:
        deployment.engine.script = codec.encode(text)

    yield _says
    deployment.engine.script = None


@pytest.fixture
def claude(deployment: Deployment) -> Iterator[Anthropic]:
    with Anthropic(
        base_url=deployment.url, api_key=deployment.key, max_retries=0, timeout=60
    ) as made:
        yield made


def test_chat_whole_and_streamed_agree(client: OpenAI, deployment: Deployment, says: Any) -> None:
    says(f"Look:\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>")
    answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content == "Look:\n"
    calls = answer.message.tool_calls
    assert calls is not None and [c.function.name for c in calls] == ["weather", "weather"]
    assert all(json.loads(c.function.arguments) == ARGUMENTS for c in calls)
    event = deployment.last_event()
    assert deployment.engine.script is not None
    assert event["output_tokens"] == len(deployment.engine.script) and event["waived_tokens"] == 0
    stream = client.chat.completions.stream(model=MODEL, messages=ASK, tools=TOOLS)
    with stream as events:
        for _ in events:
            continue
        final = events.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.content == "Look:\n"
    streamed = final.message.tool_calls
    assert streamed is not None
    assert [c.function.arguments for c in streamed] == [c.function.arguments for c in calls]
    # The answer goes back as it came, with what the tool said.
    back = [
        *ASK,
        answer.message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": c.id, "content": "fair"} for c in calls),
    ]
    says("It is fair.")
    last = client.chat.completions.create(model=MODEL, messages=back, tools=TOOLS).choices[0]
    assert (last.message.content, last.finish_reason) == ("It is fair.", "stop")
    assert last.message.tool_calls is None


def test_a_call_alone_has_no_content(client: OpenAI, says: Any) -> None:
    says(LLAMA)
    answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS).choices[0]
    assert answer.message.content is None and answer.message.tool_calls


def test_one_call_at_a_time_where_that_was_asked(
    client: OpenAI, deployment: Deployment, says: Any
) -> None:
    says(f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>")
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, parallel_tool_calls=False
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None and len(calls) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    event = deployment.last_event()
    assert answer.usage is not None and event["output_tokens"] == answer.usage.completion_tokens
    receipt = deployment.engine.receipts_given[event["request_id"]]
    assert event["output_tokens"] + event["waived_tokens"] == receipt.generated


def test_without_tools_or_with_choice_none_it_is_text(client: OpenAI, says: Any) -> None:
    says(LLAMA)
    plain = client.chat.completions.create(model=MODEL, messages=ASK).choices[0]
    assert plain.message.content == LLAMA and plain.finish_reason == "stop"
    none = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice="none"
    ).choices[0]
    assert none.message.content == LLAMA and none.message.tool_calls is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(
    deployment: Deployment, fields: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "messages": ASK, **fields}
    answer = httpx.post(
        f"{deployment.url}/v1/chat/completions", json=body, headers=deployment.headers
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_messages_have_tool_use_blocks(claude: Anthropic, says: Any) -> None:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    says(f"Look:\n<tool_call>{CALL}</tool_call>")
    answer = claude.messages.create(model=MODEL, max_tokens=99, messages=ASK, tools=tools)
    assert answer.stop_reason == "tool_use"
    text, use = answer.content
    assert text.type == "text" and text.text == "Look:\n"
    assert use.type == "tool_use" and (use.name, use.input) == ("weather", ARGUMENTS)
    for script, kinds in (
        (f"Look:\n<tool_call>{CALL}</tool_call>", ["text", "tool_use"]),
        (LLAMA, ["tool_use"]),
        ("Fair.", ["text"]),
    ):
        says(script)
        with claude.messages.stream(
            model=MODEL, max_tokens=99, messages=ASK, tools=tools
        ) as stream:
            final = stream.get_final_message()
        assert [block.type for block in final.content] == kinds
        assert final.stop_reason == ("tool_use" if "tool_use" in kinds else "end_turn")
        for block in final.content:
            if block.type == "tool_use":
                assert block.input == ARGUMENTS and block.id.startswith("toolu_")
    result = [
        *ASK,
        {"role": "assistant", "content": [text.model_dump(), use.model_dump()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id}]},
    ]
    says("Fair.")
    last = claude.messages.create(model=MODEL, max_tokens=99, messages=result, tools=tools)
    assert last.content[0].type == "text" and last.content[0].text == "Fair."


@pytest.mark.parametrize("choice", ["any", "tool", "often"])
def test_messages_refuse_a_choice_by_force(deployment: Deployment, choice: str) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 9,
        "messages": ASK,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": choice, "name": "weather"},
    }
    answer = httpx.post(f"{deployment.url}/v1/messages", json=body, headers=deployment.headers)
    assert answer.status_code == 400 and "tool_choice" in answer.json()["error"]["message"]


def test_responses_have_function_calls(client: OpenAI, says: Any) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    says(f"Look:\n<tool_call>{CALL}</tool_call>")
    answer = client.responses.create(model=MODEL, input="How is it?", tools=tools)
    assert [item.type for item in answer.output] == ["message", "function_call"]
    call = answer.output[1]
    assert call.type == "function_call" and json.loads(call.arguments) == ARGUMENTS
    with client.responses.stream(model=MODEL, input="How is it?", tools=tools) as stream:
        for _ in stream:
            continue
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call"]
    says("Fair.")
    last = client.responses.create(
        model=MODEL,
        tools=tools,
        input=[
            {"role": "user", "content": "How is it?"},
            call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "fair"},
        ],
    )
    assert last.output_text == "Fair."
    with pytest.raises(openai.BadRequestError, match=r"text\.format"):
        client.responses.create(model=MODEL, input="Hi", text={"format": {"type": "json_object"}})


def test_langchain_binds_tools(deployment: Deployment, says: Any) -> None:
    @tool
    def weather(city: str) -> str:
        """Tells the weather."""
        return city

    chat = ChatOpenAI(
        base_url=f"{deployment.url}/v1", api_key=deployment.key, model=MODEL, max_retries=0
    )
    says(f"<tool_call>{CALL}</tool_call>")
    message = chat.bind_tools([weather]).invoke("How is it?")
    assert message.tool_calls[0]["args"] == ARGUMENTS
