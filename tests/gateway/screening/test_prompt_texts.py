"""Screened is what the model reads, whole: every field that reaches a template or an upstream."""

import json
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from core.errors import ContentBlocked
from gateway.formats.chat.request import parse_chat
from gateway.formats.messages.request import parse_messages
from gateway.formats.responses.request import parse_responses
from gateway.request.inference import InferenceRequest
from gateway.screening.prompt_texts import (
    MAX_JOINED,
    documents_of,
    screened_texts,
    with_redactions,
)
from moderation.policy import Policy
from moderation.screener import Screener
from moderation.verdict import Action, Verdict

PATTERN = {"name": "bird", "pattern": "zebra\\sfinch", "action": "redact"}
POLICY = Policy.from_dict({"input": {"patterns": [PATTERN]}})
SECRET = "zebra finch"
FUNCTION: dict[str, Any] = {"name": "look_up", "parameters": {"type": "object"}}


def screened(request: InferenceRequest, policy: Policy = POLICY) -> tuple[Verdict, Any]:
    verdict = Screener().check_input(screened_texts(request), policy)
    if verdict.action is not Action.REDACT:
        return verdict, request
    return verdict, with_redactions(request, verdict.spans)


def strings_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value or ():
        if isinstance(inner, dict | list | str) and inner is not value:
            yield from [inner] if isinstance(inner, str) else strings_of(inner)


def chat(**fields: Any) -> InferenceRequest:
    return parse_chat(json.dumps({"model": "m", **fields}).encode())


def turn(**fields: Any) -> InferenceRequest:
    return chat(messages=[fields, {"role": "user", "content": "Hello"}])


def call(arguments: str, name: str = "look_up") -> dict[str, Any]:
    made = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [made]}


REQUESTS = {
    "system": turn(role="system", content=SECRET),
    "developer": turn(role="developer", content=SECRET),
    "assistant": turn(role="assistant", content=SECRET),
    "refusal": turn(role="assistant", refusal=f"No {SECRET}."),
    "name": turn(role="user", content="Hi", name="zebra finch"),
    "parts": turn(
        role="user",
        content=[{"type": "text", "text": "a zebra"}, {"type": "text", "text": " finch flew"}],
    ),
    "two messages of one role": chat(
        messages=[{"role": "user", "content": "a zebra"}, {"role": "user", "content": "finch"}]
    ),
    "tool result": chat(
        messages=[
            call("{}"),
            {"role": "tool", "tool_call_id": "c1", "content": f"found a {SECRET}"},
        ]
    ),
    "arguments": chat(messages=[call(json.dumps({"bird": SECRET}))]),
    "escaped arguments": chat(messages=[call('{"bird": "\\u007aebra finch"}')]),
    "tool description": chat(
        messages=[{"role": "user", "content": "Hi"}],
        tools=[{"type": "function", "function": {**FUNCTION, "description": f"Finds a {SECRET}"}}],
    ),
    "tool parameter": chat(
        messages=[{"role": "user", "content": "Hi"}],
        tools=[
            {
                "type": "function",
                "function": {
                    "name": "look_up",
                    "parameters": {"type": "object", "properties": {SECRET: {"type": "string"}}},
                },
            }
        ],
    ),
    "instructions": parse_responses(
        json.dumps({"model": "m", "input": "Hi", "instructions": f"Be a {SECRET}."}).encode()
    ),
    "responses tool": parse_responses(
        json.dumps(
            {
                "model": "m",
                "input": "Hi",
                "tools": [{"type": "function", **FUNCTION, "description": f"A {SECRET}"}],
            }
        ).encode()
    ),
    "anthropic system": parse_messages(
        json.dumps(
            {
                "model": "m",
                "max_tokens": 3,
                "system": SECRET,
                "messages": [{"role": "user", "content": "Hi"}],
            }
        ).encode()
    ),
}


@pytest.mark.parametrize("where", REQUESTS)
def test_every_field_that_the_model_reads_is_screened_and_redacted(where: str) -> None:
    verdict, clean = screened(REQUESTS[where])
    assert verdict.action is Action.REDACT
    left = [*strings_of(clean.messages), *strings_of(clean.tools), *strings_of(clean.extra)]
    assert left and not any(SECRET in text for text in left), left
    assert SECRET not in "".join(left)
    assert screened(clean)[0].action is Action.ALLOW


@pytest.mark.parametrize(
    ("where", "roles"),
    [
        ("system", ["user", "assistant", "tool", "tools"]),
        ("developer", ["user", "assistant", "tool", "tools"]),
        ("arguments", ["system", "user", "tool", "tools"]),
        ("tool description", ["system", "user", "assistant", "tool"]),
    ],
)
def test_a_role_is_left_out_only_by_the_policys_choice(where: str, roles: list[str]) -> None:
    document = {"input": {"deny": [SECRET]}}
    assert screened(REQUESTS[where], Policy.from_dict(document))[0].blocked
    chosen = Policy.from_dict({**document, "roles": roles})
    assert screened(REQUESTS[where], chosen)[0].action is Action.ALLOW


def test_a_developers_turn_is_screened_with_the_systems() -> None:
    policy = Policy.from_dict({"input": {"deny": [SECRET]}, "roles": ["system"]})
    assert screened(REQUESTS["developer"], policy)[0].blocked


def test_the_form_of_an_answer_is_screened() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": SECRET}}}
    request = chat(messages=[{"role": "user", "content": "Hi"}], response_format=form)
    with pytest.raises(ContentBlocked):
        screened(request)


def test_turns_of_different_roles_are_never_one_text() -> None:
    request = chat(
        messages=[{"role": "user", "content": "a zebra"}, {"role": "assistant", "content": "finch"}]
    )
    assert screened(request)[0].action is Action.ALLOW


texts = st.sampled_from(["a zebra", " finch", "finch ", "Hello", "", "zebra finch"])
messages = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "system", "assistant"]),
    texts | st.lists(texts, min_size=1).map(lambda t: [{"type": "text", "text": x} for x in t]),
)


@given(st.lists(messages, min_size=1, max_size=6))
def test_nothing_that_is_not_cut_is_changed(given_messages: list[dict[str, Any]]) -> None:
    request = chat(messages=given_messages)
    verdict, clean = screened(request)
    for old, new in zip(documents_of(request), documents_of(clean), strict=True):
        for before, after in zip(old.segments, new.segments, strict=True):
            kept = iter(before)
            assert all(character in kept for character in after.replace("[PATTERN]", ""))
            assert after == before or verdict.spans
    assert screened(clean)[0].action is Action.ALLOW


@given(st.lists(messages, min_size=1, max_size=6), st.booleans())
def test_the_texts_are_those_of_the_documents(
    given_messages: list[dict[str, Any]], has_tools: bool
) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    request = chat(messages=given_messages, **({"tools": tools} if has_tools else {}))
    found = [(each.role, each.text) for each in screened_texts(request)]
    assert found == [(each.role, each.text) for each in documents_of(request)]


def test_joined_turns_are_bounded() -> None:
    long = {"role": "user", "content": "x" * (MAX_JOINED // 2 + 1)}
    assert len(documents_of(chat(messages=[long, long, long]))) == 3
