"""What SDKs and tools write into their requests without being asked to."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.gateway.deployment import MODEL, Deployment

ASK: Any = [{"role": "user", "content": "What is a toll?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CONTEXT = 512  # of the deployment's model


@pytest.fixture
def claude(deployment: Deployment) -> Iterator[Anthropic]:
    with Anthropic(base_url=deployment.url, api_key=deployment.key, max_retries=0) as made:
        yield made


@pytest.mark.parametrize("legacy", [False, True])
def test_guidellm_reads_the_count_of_every_chunk(client: OpenAI, legacy: bool) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    more: Any = {"model": MODEL, "max_tokens": 6, "stream": True, "stream_options": options}
    if legacy:
        chunks = list(client.completions.create(prompt="What is a toll?", **more))
    else:
        chunks = list(client.chat.completions.create(messages=ASK, **more))
    counts = [each.usage.completion_tokens for each in chunks if each.usage is not None]
    assert len(counts) >= 3 and counts == sorted(counts) and counts[-1] == 6
    prompts = {each.usage.prompt_tokens for each in chunks if each.usage is not None}
    assert len(prompts) == 1


def test_responses_may_go_on_after_the_end_token(deployment: Deployment, client: OpenAI) -> None:
    client.responses.create(
        model=MODEL, input="Hi", max_output_tokens=4, store=False, extra_body={"ignore_eos": True}
    )
    assert deployment.engine.submitted[-1].sampling.ignore_eos


def test_a_number_that_an_sdk_chose_is_cut_to_the_room_and_told(claude: Anthropic) -> None:
    raw = claude.messages.with_raw_response.create(model=MODEL, max_tokens=16_384, messages=ASK)
    message = raw.parse()
    room = CONTEXT - message.usage.input_tokens - (message.usage.cache_read_input_tokens or 0)
    assert raw.headers["x-tollhouse-max-tokens"] == f"{room}; requested=16384"
    assert message.usage.output_tokens == room and message.stop_reason == "max_tokens"
    fits = claude.messages.with_raw_response.create(model=MODEL, max_tokens=2, messages=ASK)
    assert "x-tollhouse-max-tokens" not in fits.headers


def test_the_default_of_completions_is_cut_and_a_chosen_number_is_refused(client: OpenAI) -> None:
    prompt = [5] * (CONTEXT - 3)
    raw = client.completions.with_raw_response.create(model=MODEL, prompt=prompt)
    assert raw.headers["x-tollhouse-max-tokens"] == "3; requested=16"
    several = client.completions.with_raw_response.create(model=MODEL, prompt=[prompt, [5, 6]])
    assert several.headers["x-tollhouse-max-tokens"] == "3; requested=16"
    for ask in (
        lambda: client.completions.create(model=MODEL, prompt=prompt, max_tokens=16),
        lambda: client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4096),
        lambda: client.completions.create(model=MODEL, prompt=[5] * CONTEXT),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"


def test_the_ai_sdks_hints_on_tools_are_taken(claude: Anthropic) -> None:
    hints: Any = {"eager_input_streaming": True, "defer_loading": False, "strict": False}
    tool = {"name": "weather", "input_schema": SCHEMA, "allowed_callers": ["direct"], **hints}
    claude.messages.create(model=MODEL, max_tokens=2, messages=ASK, tools=[tool])
    for name, value in (
        ("defer_loading", True),
        ("allowed_callers", ["code_execution_20250825"]),
        ("input_examples", [{"city": "Bern"}]),
    ):
        with pytest.raises(anthropic.BadRequestError, match=rf"tools\[0\]\.{name}"):
            claude.messages.create(
                model=MODEL, max_tokens=2, messages=ASK, tools=[tool | {name: value}]
            )


def test_strict_tools_are_served_with_a_note_where_nothing_enforces_them(
    client: OpenAI, claude: Anthropic
) -> None:
    """openai-agents and pydantic-ai set it on every tool."""
    function = {"name": "weather", "parameters": SCHEMA, "strict": True}
    tool: Any = {"type": "function", "function": function}
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=ASK, tools=[tool], max_tokens=2
    )
    assert "strict is not enforced" in raw.headers["x-tollhouse-note"]
    flat: Any = {"type": "function", **function}
    told = client.responses.with_raw_response.create(
        model=MODEL, input="Hi", tools=[flat], store=False, max_output_tokens=2
    )
    assert "strict is not enforced" in told.headers["x-tollhouse-note"]
    own: Any = {"name": "weather", "input_schema": SCHEMA, "strict": True}
    seen = claude.messages.with_raw_response.create(
        model=MODEL, messages=ASK, tools=[own], max_tokens=2
    )
    assert "strict is not enforced" in seen.headers["x-tollhouse-note"]


def test_codexs_namespaced_tools_come_back_in_their_namespace(
    deployment: Deployment, client: OpenAI
) -> None:
    inner = {"type": "function", "name": "read", "parameters": SCHEMA}
    tools: Any = [{"type": "namespace", "name": "mcp__files", "description": "", "tools": [inner]}]
    codec = deployment.services.catalog.first().codec
    assert codec is not None
    call = '<tool_call>{"name": "mcp__files__read", "arguments": {"city": "Bern"}}</tool_call>'
    deployment.engine.script = [*codec.encode(call, special=True), codec.eos_token_ids[0]]
    try:
        answer = client.responses.create(
            model=MODEL, input="Hi", tools=tools, store=False, max_output_tokens=200
        )
    finally:
        deployment.engine.script = None
    item: Any = answer.output[-1]
    assert item.type == "function_call"
    assert (item.namespace, item.name, item.arguments) == (
        "mcp__files", "read", '{"city": "Bern"}',
    )  # fmt: skip
    history: Any = [
        {"role": "user", "content": "Hi"},
        item.to_dict(),
        {"type": "function_call_output", "call_id": item.call_id, "output": "sun"},
    ]
    client.responses.create(
        model=MODEL, input=history, tools=tools, store=False, max_output_tokens=2
    )
    assert "mcp__files__read" in codec.decode(list(deployment.engine.submitted[-1].prompt))


def test_legacy_top_logprobs_hold_the_sampled_token(client: OpenAI) -> None:
    """The fake engine lists other tokens than the sampled one beside it."""
    done = client.completions.create(model=MODEL, prompt="Hello there", max_tokens=4, logprobs=0)
    listed = done.choices[0].logprobs
    assert listed is not None and listed.tokens and listed.top_logprobs
    for token, logprob, top in zip(
        listed.tokens, listed.token_logprobs or [], listed.top_logprobs, strict=True
    ):
        assert top == {token: logprob}


@pytest.mark.parametrize("text", ["The fee", "A <|im_end|> is"])
def test_the_answer_goes_on_where_a_last_assistant_message_ends(
    deployment: Deployment, claude: Anthropic, text: str
) -> None:
    messages: Any = [*ASK, {"role": "assistant", "content": text}]
    claude.messages.create(model=MODEL, max_tokens=2, messages=messages)
    codec = deployment.services.catalog.first().codec
    assert codec is not None
    prompt = codec.decode(list(deployment.engine.submitted[-1].prompt), special=True)
    assert prompt.endswith(f"<|im_start|>assistant\n{text}")
    with pytest.raises(anthropic.BadRequestError, match="white space"):
        messages[-1] = {"role": "assistant", "content": "The fee "}
        claude.messages.create(model=MODEL, max_tokens=2, messages=messages)


def test_a_chat_continues_its_last_message_when_asked(
    deployment: Deployment, client: OpenAI
) -> None:
    messages: Any = [*ASK, {"role": "assistant", "content": "The fee"}]
    more: Any = {"continue_final_message": True, "add_generation_prompt": False}
    client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2, extra_body=more)
    codec = deployment.services.catalog.first().codec
    assert codec is not None
    assert codec.decode(list(deployment.engine.submitted[-1].prompt)).endswith("The fee")
    for wrong in ({"continue_final_message": True}, {"add_generation_prompt": False}):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(
                model=MODEL, messages=ASK, max_tokens=2, extra_body=wrong
            )


def test_numbers_on_the_wire_are_numbers(deployment: Deployment) -> None:
    """The running counts are beside the choices, as vLLM writes them."""
    body = {"model": MODEL, "messages": ASK, "max_tokens": 2, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    url = f"{deployment.url}/v1/chat/completions"
    text = httpx.post(url, json=body, headers=deployment.headers, timeout=60).text
    first = json.loads(text.split("\n\n")[0].removeprefix("data: "))
    assert first["choices"] and set(first["usage"]) >= {"prompt_tokens", "completion_tokens"}


def test_a_response_repeats_its_labels(client: OpenAI) -> None:
    labels: Any = {"safety_identifier": "u-7", "prompt_cache_key": "k"}
    answer = client.responses.create(model=MODEL, input="Hi", max_output_tokens=2, **labels)
    assert (answer.safety_identifier, answer.prompt_cache_key) == ("u-7", "k")
    stored = client.responses.retrieve(answer.id)
    assert (stored.safety_identifier, stored.prompt_cache_key, stored.user) == ("u-7", "k", None)
    other = client.responses.create(model=MODEL, input="Hi", max_output_tokens=2, user="u-8")
    assert (other.user, other.safety_identifier) == ("u-8", None)


@pytest.mark.parametrize("external", [False, True])
def test_codexs_request_is_served(deployment: Deployment, client: OpenAI, external: bool) -> None:
    """As version 0.169 sends it in each of its modes: a web search, which has no effect here, effort,
    and labels of its own."""
    search: Any = {"type": "web_search", "external_web_access": external}
    tool: Any = {"type": "function", "name": "exec_command", "strict": False, "parameters": {}}
    asked: Any = {
        "model": MODEL,
        "input": [{"type": "message", "id": "msg_1", "role": "user", "content": "Hi"}],
        "tools": [tool, search],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto", "effort": "xhigh"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2",
        "max_output_tokens": 3,
        "extra_body": {"client_metadata": {"thread_id": "01a2"}},
    }
    raw = client.responses.with_raw_response.create(**asked)
    note = raw.headers["x-tollhouse-note"]
    assert "web_search" in note and "reasoning.effort has no effect" in note
    assert raw.parse().tools[1].to_dict() == search
    codec = deployment.services.catalog.first().codec
    assert codec is not None
    prompt = codec.decode(list(deployment.engine.submitted[-1].prompt))
    assert "exec_command" in prompt and "web_search" not in prompt
    space: Any = {"type": "namespace", "name": "ns", "tools": [tool, tool | {"name": "b"}]}
    custom: Any = {"type": "custom", "name": "patch", "format": {"type": "grammar"}}
    for tools, named in (
        ([{"type": "web_search"}], "tools[0].type"),
        ([space, search, custom], "tools[2].type"),
        ([space | {"tools": [tool, custom]}], "tools[0].tools[1].type"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**(asked | {"tools": tools}))
        assert caught.value.param == named and tools[-1]["type"] in str(caught.value) + "namespace"
    forced: Any = {"tools": [search], "tool_choice": "required"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**(asked | forced))
    assert caught.value.param == "tool_choice"
