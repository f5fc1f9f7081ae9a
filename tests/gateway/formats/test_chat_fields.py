"""The optional fields of a chat: both readers agree, and each field is converted by itself."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.errors import BadRequest
from gateway.formats.chat.request import parse_chat
from gateway.request.inference import InferenceRequest

MESSAGES = [{"role": "user", "content": "Hello"}]
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

# Good and wrong values of the fields that most requests set, and of some others.
DRAWN: dict[str, list[Any]] = {
    "temperature": [0, 0.5, 2, 2.1],
    "top_p": [0, 1, -1],
    "top_k": [-1, 0, 4],
    "seed": [0, 5, 2**63],
    "length_penalty": [0, 11],
    "frequency_penalty": [0, -3],
    "max_tokens": [1, 9, 0],
    "max_completion_tokens": [7],
    "n": [1, 2],
    "stop": [[], "x", ["x", "y"], ""],
    "stream": [False, True],
    "stream_options": [{"include_usage": True}, {}],
    "user": ["", "someone", "\n"],
    "logit_bias": [{}, {"5": 1}, {"a": 1}],
    "bad_words": [[], ["x"]],
    "ignore_eos": [False, True],
    "use_beam_search": [False, True],
    "prompt_logprobs": [0, 1],
    "logprob_token_ids": [[], [1, 1]],
    "truncation_side": ["left", "right"],
    "request_id": ["", "mine", "\n"],
    "reasoning_effort": ["low", "none", "some"],
}


def parsed(messages: list[dict[str, Any]], **fields: Any) -> InferenceRequest:
    return parse_chat(json.dumps({"model": "m", "messages": messages, **fields}).encode())


def _outcome(messages: list[dict[str, Any]], fields: dict[str, Any]) -> Any:
    """The request, or what is wrong with it."""
    try:
        return parsed(messages, **fields)
    except BadRequest as error:
        return type(error), error.message, error.param, error.code


FEW = st.fixed_dictionaries({}, optional={n: st.sampled_from(v) for n, v in DRAWN.items()})


@given(fields=FEW)
@example(fields=USUAL)
@example(fields={"temperature": 0, "stream": False, "stop": [], "user": ""})
def test_both_readers_of_messages_make_the_same_request(fields: dict[str, Any]) -> None:
    general = [{**MESSAGES[0], "name": "someone"}]
    plain, read = _outcome(MESSAGES, fields), _outcome(general, fields)
    if isinstance(read, InferenceRequest):
        read = replace(read, messages=MESSAGES)
    assert read == plain


@given(fields=FEW)
def test_a_field_that_is_null_is_as_one_that_is_left_out(fields: dict[str, Any]) -> None:
    nulls = dict.fromkeys(DRAWN.keys() | OTHERS.keys())
    assert _outcome(MESSAGES, nulls | fields) == _outcome(MESSAGES, fields)


def test_of_two_wrong_fields_the_first_in_the_order_of_checks_is_told() -> None:
    wrong = {"request_id": "\n", "stop": "", "logit_bias": {"a": 1}, "seed": 2**63}
    wrong |= {"length_penalty": 11, "top_p": 2, "temperature": 3}
    told = []
    while wrong:
        with pytest.raises(BadRequest) as refused:
            parsed(MESSAGES, **wrong)
        told.append(refused.value.param)
        del wrong[str(refused.value.param)]
    assert told == [
        *("temperature", "top_p", "logit_bias", "length_penalty", "seed"),
        *("stop", "request_id"),
    ]


def test_fields_of_sampling_are_converted_one_by_one() -> None:
    converted = {"top_k": (-1, 0), "bad_words": (["a"], ("a",)), "min_tokens": (0, 0)}
    converted |= {"stop": ("x", ("x",)), "stop_token_ids": ([3], (3,)), "n": (2, 2)}
    converted |= {"logit_bias": ({"5": 1}, {5: 1}), "allowed_token_ids": ([1, 1], (1, 1))}
    request = parsed(MESSAGES, **{name: given for name, (given, _) in converted.items()})
    unset = parsed(MESSAGES)
    assert request == replace(unset, **{name: value for name, (_, value) in converted.items()})
    assert parsed(MESSAGES, request_id="mine").client_request_id == "mine"
