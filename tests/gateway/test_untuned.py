"""A request that is known to set no parameter: nothing is looked for in it, so it must have none."""

import json
from typing import Any

import pytest

from gateway.catalog.capabilities import _UNSET, _extra
from gateway.inference.chat.request import parse_chat
from gateway.inference.request import InferenceRequest
from gateway.upstreams.openai_body import _UNSET as _UNTUNED
from gateway.upstreams.openai_body import _tuning
from gateway.upstreams.sampling import _UNSET_VALUES, _sampling

MESSAGES = [{"role": "user", "content": "Hello"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
USUAL: dict[str, Any] = {
    "max_tokens": 5,
    "max_completion_tokens": 6,
    "user": "someone",
    "stream": True,
    "stream_options": {"include_usage": True},
}
OTHERS: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 7,
    "n": 2,
    "stop": "x",
    "logit_bias": {"5": 1},
    "logprobs": True,
    "ignore_eos": True,
    "reasoning_effort": "low",
    "prediction": {"type": "content", "content": "x"},
    "service_tier": "flex",
    "chat_template_kwargs": {"a": 1},
    "response_format": {"type": "json_object"},
    "guided_regex": "a",
    "safety_identifier": "someone",
    "verbosity": "low",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "echo": True,
    "truncation": "auto",
}


def parsed(messages: list[dict[str, Any]], **fields: Any) -> InferenceRequest:
    return parse_chat(json.dumps({"model": "m", "messages": messages, **fields}).encode())


@pytest.mark.parametrize("messages", [MESSAGES, PARTS], ids=["plain", "parts"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_of_usual_fields_alone_has_no_parameter(
    messages: list[dict[str, Any]], streamed: bool
) -> None:
    fields = USUAL if streamed else {"max_tokens": 5, "user": None}
    request = parsed(messages, **fields)
    assert request.untuned
    assert _sampling(request) == _UNSET_VALUES
    assert (_extra(request), _tuning(request)) == (_UNSET, _UNTUNED)


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_field_is_looked_for(name: str) -> None:
    assert not parsed(MESSAGES, **{name: OTHERS[name]}).untuned


def test_both_readers_of_messages_make_the_same_request() -> None:
    plain = parsed(MESSAGES, **USUAL)
    read = parsed([{**MESSAGES[0], "name": None}], **USUAL)  # by the general reader
    assert read == plain
