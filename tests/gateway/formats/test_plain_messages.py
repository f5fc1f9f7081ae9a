"""Chats of texts alone are decoded by a shorter way: every body gives the same request, or the same
error, as by the general one."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.errors import TollhouseError
from gateway.formats.chat import request as chat
from gateway.request.plain_messages import PlainMessages, plain_messages

contents = (
    st.text(max_size=9) | st.none() | st.just([{"type": "text", "text": "part"}]) | st.just(7)
)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "other"])
plain = st.fixed_dictionaries(
    {"role": roles.filter(lambda role: role != "other"), "content": st.text()}
)
anything = st.fixed_dictionaries(
    {"role": roles, "content": contents},
    optional={
        "name": st.just("Ann"),
        "tool_calls": st.just(
            [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        ),
        "volatile": st.just(True),
        "unknown": st.just("x") | st.none(),
        "refusal": st.none(),
    },
)
backwards = plain.map(lambda each: dict(reversed(each.items())))
options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, 1, 9]),
        "continue_final_message": st.booleans(),
        "add_generation_prompt": st.booleans(),
        "functions": st.just([{"name": "f"}]),
        "strange": st.just(1) | st.none(),
        "stream": st.booleans(),
    },
)


def parsed(body: dict[str, Any]) -> object:
    try:
        return chat.parse_chat(json.dumps(body).encode())
    except TollhouseError as error:
        return str(error), error.param, error.code


@settings(max_examples=300, deadline=None)
@given(
    messages=st.lists(plain, max_size=5) | st.lists(plain | anything | backwards, max_size=5),
    fields=options,
)
@example([{"role": "user", "content": "a"}, {"role": "function", "content": "b"}], {})
@example([{"content": "a", "role": "user"}], {})
def test_a_body_is_read_as_by_the_general_decoder(
    messages: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    body = {"model": "m", "messages": messages, **fields}
    short = parsed(body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "_plain_decoder", msgspec.json.Decoder(int))  # reads none of them
        general = parsed(body)
    assert short == general
    if not isinstance(short, tuple):
        # What is sent on has its fields in the same order.
        assert json.dumps(short.messages) == json.dumps(general.messages)  # type: ignore[attr-defined]


def test_only_roles_with_texts_are_plain() -> None:
    found = plain_messages([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}])
    assert type(found) is PlainMessages
    assert (found.roles, found.texts) == (("user", "tool"), ("a", "b"))
    for other in (
        [],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"content": "a", "role": "user"}],
        [{"role": "function", "content": "a"}],
        [{"role": "user", "content": "a", "name": "b"}],
    ):
        assert plain_messages(other) is None


def test_an_ordinary_chat_is_plain() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
    assert type(chat.parse_chat(json.dumps(body).encode()).messages) is PlainMessages
