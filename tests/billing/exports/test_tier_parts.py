"""How the usage of a day divides among tiers, packages and free units."""

from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest

from billing.exports.focus.tier_parts import Part, parts_at, parts_of
from billing.pricing.price_terms import parse
from billing.pricing.pricing import Component, PriceVersion, Rate

M = 10**6  # picounits a token, of a price of 1 a million


def rate_of(written: Any) -> Rate:
    return parse({"output": written})[Component.OUTPUT]


def shown(parts: list[Part]) -> dict[str, tuple[int, int]]:
    return {each.point.name: (each.quantity, each.priced) for each in parts}


TIERS = [
    {"up_to": 100, "price": "3", "flat": "0.01"},
    {"up_to": 300, "price": "2"},
    {"price": "1"},
]
SOME_FREE = {"scheme": "flat", "price": "5", "free": 10}
GRADUATED = {"scheme": "graduated", "tiers": TIERS, "free": 10}
VOLUME = {"scheme": "volume", "tiers": [{"up_to": 100, "price": "3"}, {"price": "1"}]}


@pytest.mark.parametrize(
    ("written", "before", "quantity", "amount", "expected"),
    [
        ("5", 7, 4, 20 * M, {"standard": (4, 4)}),
        (
            {"scheme": "flat", "price": "5", "free": 10},
            7,
            5,
            10 * M,
            {"free": (3, 3), "standard": (2, 2)},
        ),
        # Another key had the free units first.
        ({"scheme": "flat", "price": "5", "free": 10}, 0, 5, 25 * M, {"standard": (5, 5)}),
        (
            {"scheme": "package", "size": 10, "price": "7"},
            0,
            25,
            21 * 10**12,
            {"package-10": (25, 3)},
        ),
        ({"scheme": "package", "size": 10, "price": "7"}, 3, 5, 0, {"package-10": (5, 0)}),
        (GRADUATED, 0, 10, 0, {"free": (10, 10)}),
        (
            GRADUATED,
            8,
            12,
            30 * M + 10**10,
            {"free": (2, 2), "tier-1": (10, 10), "tier-1-entry": (0, 1)},
        ),
        (GRADUATED, 105, 10, 25 * M, {"tier-1": (5, 5), "tier-2": (5, 5)}),
        # All of a tier in one day: 5 of the first, 200 of the second and 3 of the third.
        (GRADUATED, 105, 208, 418 * M, {"tier-1": (5, 5), "tier-2": (200, 200), "tier-3": (3, 3)}),
        # The same amount at a position that is not what the books had.
        (GRADUATED, 500, 10, 25 * M, {"tier-1": (5, 5), "tier-2": (5, 5)}),
        (VOLUME, 0, 40, 120 * M, {"volume-1": (40, 40)}),
        (VOLUME, 90, 20, (20 - 180) * M, {"volume-1": (-90, -90), "volume-2": (110, 110)}),
        # Of another key whose usage was before it on the same day.
        (VOLUME, 130, 20, (20 - 180) * M, {"volume-1": (-90, -90), "volume-2": (110, 110)}),
        (VOLUME, 0, 0, -2 * 45 * M, {"volume-1": (-45, -45), "volume-2": (45, 45)}),
    ],
)
def test_the_parts_cost_what_was_booked(
    written: Any, before: int, quantity: int, amount: int, expected: dict[str, tuple[int, int]]
) -> None:
    rate = rate_of(written)
    parts = parts_of(rate, 0, before, quantity, amount)
    assert shown(parts) == expected
    assert sum(each.priced * each.point.unit for each in parts) == amount
    assert sum(each.quantity for each in parts) == quantity


@pytest.mark.parametrize(
    "written", [GRADUATED, VOLUME, {"scheme": "package", "size": 9, "price": "2"}]
)
@pytest.mark.parametrize("discount", [0, 125_000])
def test_parts_of_drawn_days_sum_to_their_amounts(written: Any, discount: int) -> None:
    """Each day's amount is what the price says at its position; with a discount, to a picounit a unit."""
    draw, rate = Random(7), rate_of(written)
    version = PriceVersion(
        "v",
        "USD",
        parse({"output": written}),
        discount,
        effective_from=datetime(2026, 1, 1, tzinfo=UTC),
    )
    for _ in range(200):
        before = 0
        for _ in range(12):
            quantity = draw.randrange(1, 90)
            amount = version.marginal(Component.OUTPUT, before, quantity)
            parts = parts_of(rate, discount, before, quantity, amount)
            cost = sum(each.priced * each.point.unit for each in parts) * (10**6 - discount)
            assert abs(cost - amount * 10**6) <= (quantity * 10**6 if discount else 0)
            assert sum(each.quantity for each in parts) == quantity
            if discount == 0 and rate.scheme != "package":
                at = parts_at(rate, before, quantity)
                assert shown(at) == shown(parts)
            before += quantity


def test_what_no_tiers_explain_has_the_parts_of_its_position() -> None:
    """As of usage rated late that moved another version's tier."""
    parts = parts_of(rate_of(GRADUATED), 0, 105, 10, 10**15)
    assert shown(parts) == {"tier-1": (5, 5), "tier-2": (5, 5)}
