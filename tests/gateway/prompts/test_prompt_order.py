"""Prompt order: byte-stable, idempotent, never touches text, never inside a tool or block."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompts.prompt_order import PromptOrder, reorder, volatile_rule

SAFE, FULL, OFF = PromptOrder.SAFE, PromptOrder.FULL, PromptOrder.OFF


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("weather", type="object", required=["unit", "city"], properties={"unit": {}, "city": {}}),
    tool("calendar", type="object", properties={"day": {"enum": ["tue", "mon"]}}),
    tool("mail", type="object", properties={"to": {"type": "string"}}),
]


names = st.sampled_from(["reasoning", "answer", "b", "a", "required", "enum", "properties"])
schemas = st.recursive(
    st.none() | st.booleans() | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
tools = st.lists(
    st.builds(lambda name, schema: tool(name, schema=schema), names, schemas), max_size=5
)


@given(tools, st.sampled_from(list(PromptOrder)))
def test_what_is_inside_a_tool_stays_byte_for_byte(given_tools: Any, order: PromptOrder) -> None:
    """Templates serialise a schema in its own order, and models write properties in that order."""
    before = sorted(json.dumps(each) for each in given_tools)
    assert sorted(json.dumps(each) for each in reorder(order, [], given_tools).tools) == before


@given(st.permutations(TOOLS))
def test_shuffled_tools_give_the_same_bytes(shuffled: Any) -> None:
    wanted = json.dumps(reorder(SAFE, [], TOOLS).tools)
    assert json.dumps(reorder(SAFE, [], shuffled).tools) == wanted


roles = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
parts = st.fixed_dictionaries(
    {"type": st.just("text"), "text": st.sampled_from(["rules", "Today is 2026-11-21", "be kind"])},
    optional={"volatile": st.booleans()},
)
chats = st.lists(
    st.fixed_dictionaries(
        {"role": roles, "content": st.one_of(st.text(max_size=5), st.lists(parts, max_size=4))}
    ),
    max_size=8,
)


def _texts(messages: Any) -> list[str]:
    found: list[str] = []
    for message in messages:
        content = message["content"]
        found += [content] if isinstance(content, str) else [part["text"] for part in content]
    return found


def _blocks(messages: Any) -> list[str]:
    """Every block as bytes: a part, or a message whose content is one text."""
    found: list[str] = []
    for message in messages:
        content = message["content"]
        whole = [message] if isinstance(content, str) else content
        found += [json.dumps(each) for each in whole]
    return found


@given(chats, st.sampled_from(list(PromptOrder)))
def test_what_is_inside_a_block_stays_byte_for_byte(messages: Any, order: PromptOrder) -> None:
    once = reorder(order, messages, (), volatile_rule(["dates"])).messages
    assert sorted(_blocks(once)) == sorted(_blocks(messages))
    if order is not FULL:
        assert json.dumps(once) == json.dumps(messages)


@given(chats, st.sampled_from(list(PromptOrder)))
def test_reordering_is_idempotent_and_keeps_every_text(messages: Any, order: PromptOrder) -> None:
    rule = volatile_rule(["dates"])
    once = reorder(order, messages, TOOLS, rule)
    twice = reorder(order, once.messages, once.tools, rule)
    assert (twice.messages, twice.tools, twice.changed) == (once.messages, once.tools, ())
    assert sorted(_texts(once.messages)) == sorted(_texts(messages))


@given(chats, chats)
def test_a_later_turn_never_changes_the_order_of_earlier_ones(first: Any, more: Any) -> None:
    rule = volatile_rule(["dates"])
    head = [*first, {"role": "user", "content": "q"}]
    before = reorder(FULL, head, (), rule).messages
    assert reorder(FULL, [*head, *more], (), rule).messages[: len(before)] == before


def test_off_changes_nothing() -> None:
    assert reorder(OFF, [{"role": "user", "content": "x"}], TOOLS).tools == TOOLS
    assert reorder(OFF, [], TOOLS).changed == ()


def test_a_cache_mark_pins_the_order_of_tools() -> None:
    marked = [{**TOOLS[0], "cache_control": {"type": "ephemeral"}}, *TOOLS[1:]]
    names = [each["function"]["name"] for each in reorder(SAFE, [], marked).tools]
    assert names == ["weather", "calendar", "mail"]


def test_full_puts_volatile_blocks_just_before_the_first_turn() -> None:
    messages = [
        {"role": "system", "content": "Today is 2026-11-21."},
        {"role": "system", "content": "You sell tickets."},
        {"role": "system", "content": "Case 7", "volatile": True},
        {"role": "system", "content": "Never lie."},
        {"role": "user", "content": "Hi on 2026-11-21"},
        {"role": "system", "content": "It is now 12:30."},
    ]
    got = reorder(FULL, messages, (), volatile_rule(["dates"]))
    assert [message["content"] for message in got.messages] == [
        "You sell tickets.",
        "Never lie.",
        "Today is 2026-11-21.",
        "Case 7",
        "Hi on 2026-11-21",
        "It is now 12:30.",
    ]
    assert got.changed == ("volatile",)
    assert reorder(SAFE, messages, (), volatile_rule(["dates"])).messages == messages


def test_the_client_s_own_mark_wins_over_the_rule() -> None:
    messages = [
        {"role": "system", "content": "Founded on 1999-01-01.", "volatile": False},
        {"role": "system", "content": "Be brief."},
    ]
    assert reorder(FULL, messages, (), volatile_rule(["dates"])).messages == messages


@pytest.mark.parametrize(("kinds", "patterns"), [(["moods"], []), ([], ["(?=look)"]), ([], ["("])])
def test_a_wrong_rule_is_refused(kinds: list[str], patterns: list[str]) -> None:
    with pytest.raises(ValueError, match="volatile"):
        volatile_rule(kinds, patterns)
