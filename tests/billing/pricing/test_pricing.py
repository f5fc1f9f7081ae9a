"""Prices: the price of a whole quantity, in any order, within the hold; refused when they are wrong."""

from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.pricing import price_terms, prices
from billing.pricing.pricing import Component, Counts, PriceBook, PriceVersion, Rate
from core.clock import FakeClock
from core.errors import BadRequest, Conflict, NotFound
from tests.billing.conftest import START, Deployment
from tests.billing.simulation.reference import price_by_hand

amounts = st.integers(0, 5_000).map(lambda n: f"{n / 100:.2f}")
small = st.integers(1, 40)


@st.composite
def rules(draw: st.DrawFn) -> Any:
    scheme = draw(st.sampled_from(["flat", "package", "graduated", "volume"]))
    free = draw(st.sampled_from([0, 0, 3, 25]))
    if scheme == "flat":
        return {"scheme": scheme, "price": draw(amounts), "free": free}
    if scheme == "package":
        return {"scheme": scheme, "price": draw(amounts), "size": draw(small), "free": free}
    steps = sorted(draw(st.sets(small, max_size=3)))
    found = [draw(amounts) for _ in range(len(steps) + 1)]
    if scheme == "volume":
        found.sort(key=Fraction, reverse=True)
    tiers: list[dict[str, Any]] = [
        {"up_to": step, "price": price} for step, price in zip([*steps, None], found, strict=True)
    ]
    if scheme == "graduated":
        for tier in tiers:
            tier["flat"] = draw(amounts)
    return {"scheme": scheme, "tiers": tiers, "free": free}


def version_of(written: dict[str, Any], discount: str = "0") -> PriceVersion:
    return prices.validate(prices.PriceDraft("m", written, START, discount_percent=discount))


@given(rule=rules(), quantity=st.integers(0, 90), token=st.booleans())
def test_a_price_is_what_one_gets_by_hand(rule: Any, quantity: int, token: bool) -> None:
    component = Component.OUTPUT if token else Component.REQUEST
    version = version_of({component.value: rule})
    by_hand = price_by_hand(rule, quantity, token) * 10**12
    assert version.total(component, quantity) == by_hand


@given(
    rule=rules(),
    parts=st.lists(st.integers(0, 30), max_size=8),
    discount=st.integers(0, 1_000_000),
    data=st.data(),
)
def test_charges_sum_to_the_price_of_the_whole_in_any_order(
    rule: Any, parts: list[int], discount: int, data: st.DataObject
) -> None:
    version = version_of({"output": rule}, f"{discount / 10_000:.4f}")
    for order in (parts, data.draw(st.permutations(parts))):
        before = charged = 0
        for part in order:
            charged += version.marginal(Component.OUTPUT, before, part)
            before += part
        assert charged == version.total(Component.OUTPUT, sum(parts))


@given(
    written=st.fixed_dictionaries(
        {}, optional={each.value: rules() for each in Component if each != Component.GPU_SECOND}
    ).filter(bool),
    stand=st.integers(0, 60),
    prompt=st.integers(0, 50),
    data=st.data(),
)
def test_the_hold_covers_every_request(
    written: dict[str, Any], stand: int, prompt: int, data: st.DataObject
) -> None:
    version = version_of(written)
    cached = data.draw(st.integers(0, prompt))
    most = data.draw(st.integers(0, 50))
    output = data.draw(st.integers(0, most))
    waived = data.draw(st.integers(0, most - output))
    used = Counts.of_answer(prompt, cached, output, waived, adapter=True)
    cost = sum(version.marginal(component, stand, count) for component, count in used.by_component)
    assert cost <= version.upper_bound(prompt, most)


@given(rule=rules(), quantity=st.integers(0, 60))
def test_the_most_of_one_price_or_of_packages_is_reached_somewhere(
    rule: Any, quantity: int
) -> None:
    version = version_of({"request": rule})
    (rate,) = version.rates.values()
    costs = [version.marginal(Component.REQUEST, stand, quantity) for stand in range(120)]
    assert max(costs) <= rate.most(quantity)
    if rule["scheme"] in ("flat", "package"):
        assert max(costs) == rate.most(quantity)


@given(written=st.dictionaries(st.sampled_from([c.value for c in Component]), rules(), min_size=1))
def test_what_is_stored_is_what_was_tried(written: dict[str, Any]) -> None:
    version = version_of(written, "12.5")
    rates, discount = price_terms.load(price_terms.dump(version.rates, version.discount_ppm))
    assert (rates, discount) == (version.rates, 125_000)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"input": "-1"}, "it is negative"),
        ({"input": 0.15}, "never a float"),
        ({"input": "0.0000001"}, "more than six decimals"),
        ({"tokens": "1"}, "is not a component"),
        ({}, "no component"),
        ({"input": "150000"}, "implausibly high"),
        ({"output": {"scheme": "graduated", "tiers": [{"up_to": 5, "price": "1"}]}}, "gap"),
        (
            {
                "output": {
                    "scheme": "graduated",
                    "tiers": [
                        {"up_to": 9, "price": "1"},
                        {"up_to": 5, "price": "1"},
                        {"up_to": None, "price": "1"},
                    ],
                }
            },
            "overlap or leave a gap",
        ),
        (
            {
                "output": {
                    "scheme": "volume",
                    "tiers": [{"up_to": 5, "price": "1"}, {"up_to": None, "price": "2"}],
                }
            },
            "volume tiers must fall",
        ),
        ({"output": {"scheme": "package", "price": "1", "size": 0}}, "at least one unit"),
        ({"output": {"scheme": "steps", "price": "1"}}, "must be one of flat"),
        ({"output": {"price": "1", "tires": []}}, "unknown field tires"),
    ],
)
def test_a_wrong_price_is_refused_with_the_reason(written: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        version_of(written)


def test_an_unknown_currency_and_a_wrong_discount_are_refused() -> None:
    with pytest.raises(BadRequest, match="currency 'XYZ'"):
        prices.validate(prices.PriceDraft("m", {"input": "1"}, START, currency="XYZ"))
    with pytest.raises(BadRequest, match="the discount is 101 percent"):
        prices.validate(prices.PriceDraft("m", {"input": "1"}, START, discount_percent="101"))


def test_the_most_particular_price_in_force_is_pinned(lite: Deployment) -> None:
    day = timedelta(days=1)
    made = {
        "list": lite.price({"input": "3"}, model="m", effective_from=START),
        "adapter": lite.price({"input": "4"}, model="m", adapter="lora", effective_from=START),
        "tenant": lite.price({"input": "2"}, model="m", tenant_id="acme", effective_from=START),
        "any": lite.price({"input": "9"}, model="*", effective_from=START),
    }
    later = lite.price({"input": "1"}, model="m", effective_from=START + day)
    with lite.database.read() as session:
        book = prices.load_price_book(session)
    assert book.pin("other", "m", None, START, "USD").id == made["list"].id
    assert book.pin("other", "m", "lora", START, "USD").id == made["adapter"].id
    assert book.pin("acme", "m", "lora", START, "USD").id == made["tenant"].id
    assert book.pin("other", "unheard-of", None, START, "USD").id == made["any"].id
    assert book.pin("other", "m", None, START + day, "USD").id == later.id
    with pytest.raises(NotFound, match="No price is in force"):
        book.pin("other", "m", None, START - day, "USD")
    with pytest.raises(NotFound, match="tollhouse price set"):
        PriceBook(()).pin("other", "m", None, START, "USD")


def test_overlapping_dates_are_refused(lite: Deployment, clock: FakeClock) -> None:
    month = timedelta(days=30)
    lite.price({"input": "1"}, model="m", effective_from=START, effective_to=START + month)
    for start, end in ((START, None), (START + month / 2, START + 2 * month)):
        with pytest.raises(Conflict, match="overlaps"):
            lite.price({"input": "2"}, model="m", effective_from=start, effective_to=end)
    lite.price({"input": "2"}, model="m", effective_from=START + month)
    with pytest.raises(BadRequest, match="is not after effective_from"):
        lite.price({"input": "2"}, model="n", effective_from=START, effective_to=START)


def test_a_discount_is_a_price_of_the_tenant(lite: Deployment, clock: FakeClock) -> None:
    draft = prices.PriceDraft("demo", {}, START, tenant_id="acme", discount_percent="15")
    with lite.database.transaction() as session:
        made = prices.discount(session, clock, draft, lite.version)
    assert made.linear[Component.OUTPUT] == 600_000 * 85 // 100
    with lite.database.read() as session:
        assert prices.load_price_book(session).pin("acme", "demo", None, START, "USD").id == made.id


def test_a_default_price_is_made_once(lite: Deployment, clock: FakeClock) -> None:
    with lite.database.transaction() as session:
        again = prices.ensure_default_prices(session, clock, "demo")
        assert again.id == lite.version.id
        other = prices.ensure_default_prices(session, clock, "llama")
        assert prices.ensure_default_prices(session, clock, "llama").id == other.id


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ((Rate, "most", lambda *_: 1), "more than the hold"),
        ((PriceVersion, "marginal", lambda *_: -1), "make the total price rise"),
    ],
)
def test_a_price_that_a_hold_would_not_cover_or_that_falls_is_refused_when_it_is_tried(
    monkeypatch: pytest.MonkeyPatch, fault: tuple[type, str, Any], reason: str
) -> None:
    """No terms lead there; a fault in the arithmetic would, and is found before a price is saved."""
    version_of({"output": "3"})
    monkeypatch.setattr(*fault)
    with pytest.raises(BadRequest) as refused:
        version_of({"output": "3"})
    assert reason in f"{refused.value.message} {refused.value.next_step}".lower()
    assert refused.value.code == "price_refused"
