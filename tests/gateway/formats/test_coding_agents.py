"""What Claude-style coding agents send to /v1/messages, with Anthropic's SDK."""

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from gateway.formats.messages.request import parse_messages
from tests.gateway.deployment import MODEL, Deployment

ASK: Any = [{"role": "user", "content": "List the files."}]
TOOL: Any = {"name": "ls", "input_schema": {"type": "object", "properties": {}}}
MARK = {"type": "ephemeral", "ttl": "1h"}


@pytest.fixture
def claude(deployment: Deployment) -> Iterator[Anthropic]:
    with Anthropic(base_url=deployment.url, api_key=deployment.key, max_retries=0) as made:
        yield made


def prompt_of(deployment: Deployment) -> str:
    codec = deployment.services.catalog.first().codec
    assert codec is not None
    return codec.decode(list(deployment.engine.submitted[-1].prompt), special=True)


HISTORY: Any = [
    *ASK,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "PRIVATE THOUGHT", "signature": "sig"},
            {"type": "redacted_thinking", "data": "SEALED"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {}, "caller": None},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "is_error": True,
                "content": [{"type": "text", "text": "permission denied"}],
                "cache_control": MARK,
            },
            {"type": "text", "text": "Try again.", "cache_control": MARK},
        ],
    },
]


def test_thoughts_in_the_history_are_taken_and_errors_of_tools_are_told(
    deployment: Deployment, claude: Anthropic
) -> None:
    claude.messages.create(model=MODEL, max_tokens=2, messages=HISTORY, tools=[TOOL])
    prompt = prompt_of(deployment)
    assert "PRIVATE THOUGHT" not in prompt and "SEALED" not in prompt
    assert "Error: permission denied" in prompt and "Try again." in prompt
    wrong: Any = [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]"):
        claude.messages.create(model=MODEL, max_tokens=2, messages=wrong)


def test_cache_marks_keep_their_place() -> None:
    raw = json.dumps({"model": MODEL, "max_tokens": 2, "messages": HISTORY}).encode()
    messages = parse_messages(raw).messages
    assert messages is not None
    assert [m.get("cache_control") for m in messages] == [None, None, MARK, None]
    assert messages[3]["content"][0]["cache_control"] == MARK


def test_an_agents_options_are_served_with_notes(claude: Anthropic) -> None:
    more: Any = {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "medium"},
        "cache_control": {"type": "ephemeral"},
        "speed": "standard",
        "diagnostics": {"previous_message_id": None},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    raw = claude.messages.with_raw_response.create(
        model=MODEL, max_tokens=2, messages=ASK, tools=[TOOL], extra_body=more
    )
    note = raw.headers["x-tollhouse-note"]
    assert "if the model marks it" in note and "effort has no effect" in note
    counted = claude.messages.count_tokens(
        model=MODEL, messages=HISTORY, tools=[TOOL], extra_body=more
    )
    assert counted.input_tokens > 20


def test_a_prefill_is_counted_as_it_is_used(claude: Anthropic) -> None:
    begun: Any = [*ASK, {"role": "assistant", "content": "The answer is"}]
    counted = claude.messages.count_tokens(model=MODEL, messages=begun)
    used = claude.messages.create(model=MODEL, messages=begun, max_tokens=2).usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"output_config": {"mood": 1}}, "output_config.mood"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            r"context_management\.edits\[0\]",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"speed": "fast"}, "speed"),
        ({"diagnostics": {"previous_message_id": "msg_1"}}, "diagnostics"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    claude: Anthropic, more: Any, named: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=named):
        claude.messages.create(model=MODEL, max_tokens=2, messages=ASK, extra_body=more)


def test_a_message_batch_runs_from_creation_to_results(
    deployment: Deployment, claude: Anthropic
) -> None:
    params: Any = {"model": MODEL, "max_tokens": 3, "messages": ASK}
    wrong: Any = params | {"temperature": 9}
    made = claude.messages.batches.create(
        requests=[{"custom_id": "a", "params": params}, {"custom_id": "b", "params": wrong}]
    )
    assert made.type == "message_batch" and made.processing_status == "in_progress"
    assert made.request_counts.processing == 2
    deadline = time.monotonic() + 60
    batch = made
    while batch.processing_status != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
        batch = claude.messages.batches.retrieve(made.id)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 1)
    results = {each.custom_id: each.result for each in claude.messages.batches.results(made.id)}
    done, failed = results["a"], results["b"]
    assert done.type == "succeeded" and done.message.usage.output_tokens == 3
    assert failed.type == "errored" and failed.error.error.type == "invalid_request_error"
    (event,) = deployment.events(1, batch_job=made.id.replace("msgbatch_", "batch_"))
    assert event["output_tokens"] == 3
    assert [each.id for each in claude.messages.batches.list()] == [made.id]
    assert claude.messages.batches.delete(made.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.retrieve(made.id)


def test_a_wrong_message_batch_is_refused(claude: Anthropic) -> None:
    params: Any = {"model": MODEL, "max_tokens": 3, "messages": ASK}
    one: Any = {"custom_id": "a", "params": params}
    with pytest.raises(anthropic.BadRequestError, match="used twice"):
        claude.messages.batches.create(requests=[one, one])
    with pytest.raises(anthropic.BadRequestError, match="name no model"):
        claude.messages.batches.create(requests=[{"custom_id": "a", "params": {}}])  # type: ignore[typeddict-item]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.cancel("msgbatch_nothing")
