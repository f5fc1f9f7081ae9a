"""Tools are sorted and written once for a tenant: the same order, texts and prompt as made anew."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prompts import tool_lists
from gateway.prompts.prompt_order import PromptOrder, reorder
from gateway.prompts.tool_lists import ToolList, json_text, tool_list

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
tools = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["a", "b", "c", "d"])},
                optional={"parameters": st.dictionaries(st.text(max_size=4), values, max_size=3)},
            ),
        },
        optional={"cache_control": st.just({"type": "ephemeral"})},
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(given_tools=tools, again=st.integers(1, 2))
def test_a_list_is_that_of_prompt_order(given_tools: list[dict[str, Any]], again: int) -> None:
    wanted = reorder(PromptOrder.SAFE, [], given_tools)
    for _ in range(again):
        found = tool_list("t1", given_tools)
        if any("cache_control" in each for each in given_tools):
            assert found is None
        elif found is not None:  # an integer may be too large for the key
            assert found == wanted.tools
            assert found.moved == (wanted.changed == ("tools",))
            assert list(found.texts) == [json_text(each) for each in wanted.tools]


def named(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


def test_a_list_is_made_once_for_its_own_tenant() -> None:
    first = tool_list("t1", named("b", "a"))
    assert type(first) is ToolList and first.moved
    assert tool_list("t1", named("b", "a")) is first
    assert tool_list("t2", named("b", "a")) is not first
    assert tool_list("t1", named("a", "b")) is not first


def test_large_lists_and_numbers_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tool_list("t1", named("x" * 20_000)) is None
    assert tool_list("t1", [{"function": {"name": "a", "parameters": {"most": 2**70}}}]) is None
    monkeypatch.setattr(tool_lists, "_MOST_LISTS", 3)
    for number in range(9):
        tool_list("t1", named(f"tool {number}"))
    assert len(tool_lists._known) == 3
