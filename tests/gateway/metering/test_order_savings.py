"""What a prompt owes to prompt order, against counts by hand: each part below has equally many bytes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metering import order_savings
from gateway.metering.order_savings import GivenOrders
from gateway.prompts.prompt import Prompt
from gateway.request.inference import InferenceRequest

OWNER = ("org_a", "m", None)
Parts = list[dict[str, Any]]


def parts(names: str) -> Parts:
    return [{"name": name} for name in names]


def request(tools: str, messages: str) -> InferenceRequest:
    return InferenceRequest(
        "/v1", "m", tools=parts(tools) or None, messages=parts(messages) or None
    )


def cached(
    orders: GivenOrders,
    given: str,
    after: str | None = None,
    *,
    messages: tuple[str, str] = ("", ""),
    owner: tuple[str | None, ...] = OWNER,
    order: str | None = "safe:tools",
) -> int | None:
    ordered = request(given[::-1] if after is None else after, messages[1])
    prompt = Prompt(ordered, list(range(60)), 1, order=order)
    return orders.cached_tokens(owner, request(given, messages[0]), prompt)


@pytest.mark.parametrize("order", [None, "safe"])
def test_nothing_is_estimated_where_prompt_order_changed_nothing(order: str | None) -> None:
    orders = GivenOrders()
    assert cached(orders, "AB", order=order) is None
    assert cached(orders, "AB") == 0, "a prompt that was not estimated is not remembered"


def test_a_prefix_that_was_given_before_would_have_been_cached() -> None:
    orders = GivenOrders()
    assert cached(orders, "AB") == 0
    assert cached(orders, "AB") == 60
    assert cached(orders, "AC") == 30
    assert cached(orders, "ABC") == 40
    assert cached(orders, "BA") == 0
    assert cached(orders, "CAB") == 0, "what is known behind an unknown part is no prefix"


def test_parts_left_in_place_owe_nothing_to_the_order() -> None:
    assert cached(GivenOrders(), "ABC", "ACB") == 20
    assert cached(GivenOrders(), "ABC", "BAC") == 0, "behind a moved part nothing is in place"
    assert cached(GivenOrders(), "ABC", "A") == 20
    assert cached(GivenOrders(), "ABC", "ABC") == 60


def test_tools_come_before_messages() -> None:
    orders = GivenOrders()
    assert cached(orders, "AB", "BA", messages=("X", "X")) == 0
    assert cached(orders, "AB", "BA", messages=("Y", "Y")) == 40
    assert cached(GivenOrders(), "A", "A", messages=("XY", "YX")) == 20
    assert cached(GivenOrders(), "", "", messages=("XY", "XZ")) == 30


def test_each_owner_has_a_cache_of_its_own() -> None:
    orders = GivenOrders()
    cached(orders, "AB")
    assert cached(orders, "AB", owner=("org_b", "m", None)) == 0


def test_a_prompt_without_parts_owes_nothing() -> None:
    assert cached(GivenOrders(), "") == 0


def test_the_prefixes_that_were_used_least_lately_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order_savings, "_MAX_PARTS", 2)
    orders = GivenOrders()
    cached(orders, "A")
    cached(orders, "B")
    assert cached(orders, "A", "") == 60
    cached(orders, "C")
    assert [cached(orders, "A", ""), cached(orders, "B", "")] == [60, 0]


@given(st.lists(st.tuples(st.text("AB", max_size=4), st.randoms()), max_size=6))
def test_each_part_counts_as_one_by_one(prompts: list[tuple[str, Any]]) -> None:
    orders, seen = GivenOrders(), set[str]()
    for given_names, shuffled in prompts:
        after = "".join(shuffled.sample(given_names, len(given_names)))
        expected = 0
        in_place = known = True
        for count in range(1, len(given_names) + 1):
            in_place = in_place and given_names[count - 1] == after[count - 1]
            known = known and given_names[:count] in seen
            seen.add(given_names[:count])
            expected = count if in_place or known else expected
        found = cached(orders, given_names, after)
        assert found == 60 * expected // max(1, len(given_names))
