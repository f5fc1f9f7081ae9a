"""Terms of prices at their exact borders, as they are stored, and as they are pinned and held."""

from datetime import timedelta
from types import MappingProxyType
from typing import Any

import pytest

from billing.pricing import price_terms, pricing
from billing.pricing.pricing import (
    Component,
    Counts,
    PriceBook,
    PriceVersion,
    Rate,
    Scheme,
    Tier,
    counted,
)
from core.errors import BadRequest, NotFound
from core.events import UsageKind
from tests.billing.conftest import START, Deployment

DAY, INSTANT = timedelta(days=1), timedelta(microseconds=1)
STEPS = [{"up_to": 10, "price": "5", "flat": "0.5"}, {"up_to": None, "price": "2"}]


def version(written: dict[str, Any], **fields: Any) -> PriceVersion:
    return PriceVersion("v", "USD", price_terms.parse(written), **fields)


def checked(written: dict[str, Any], **fields: Any) -> None:
    price_terms.check(version(written, **fields))


def test_the_stored_form_has_every_term() -> None:
    """Per token for what is written per million, per unit for the rest; a package is never divided."""
    rates = price_terms.parse(
        {
            "input": "0.15",
            "request": {"price": "0.01", "free": 7},
            "output": {"scheme": "package", "size": 1000, "price": "3"},
            "image": {"scheme": "graduated", "tiers": STEPS, "free": 4},
            "waived": {"scheme": "volume", "tiers": [{"up_to": 10, "price": "5"}, {"price": "2"}]},
        }
    )
    assert price_terms.dump(rates, 30) == {
        "discount_ppm": 30,
        "rates": {
            "input": {"scheme": "flat", "tiers": [[None, 150_000, 0]], "package": 1, "free": 0},
            "request": {"scheme": "flat", "tiers": [[None, 10**10, 0]], "package": 1, "free": 7},
            "output": {
                "scheme": "package",
                "tiers": [[None, 3 * 10**12, 0]],
                "package": 1000,
                "free": 0,
            },
            "image": {
                "scheme": "graduated",
                "tiers": [[10, 5 * 10**12, 5 * 10**11], [None, 2 * 10**12, 0]],
                "package": 1,
                "free": 4,
            },
            "waived": {
                "scheme": "volume",
                "tiers": [[10, 5_000_000, 0], [None, 2_000_000, 0]],
                "package": 1,
                "free": 0,
            },
        },
    }


@pytest.mark.parametrize(
    ("component", "written", "words"),
    [
        ("input", "0.15", "0.15"),
        ("request", {"price": "0.01", "free": 7000}, "7,000 free, then 0.01"),
        ("output", {"scheme": "package", "size": 1000, "price": "3"}, "3 for each 1,000 begun"),
        (
            "image",
            {"scheme": "graduated", "tiers": STEPS, "free": 4},
            "4 free, then 5 up to 10 (and 0.5 once), then 2",
        ),
        (
            "output",
            {"scheme": "volume", "tiers": [{"up_to": 10**6, "price": "0.2"}, {"price": "0"}]},
            "0.2 up to 1,000,000, then 0; the tier of the whole quantity prices all of it",
        ),
    ],
)
def test_a_price_is_shown_in_words_with_every_tier(
    component: str, written: Any, words: str
) -> None:
    (rate,) = price_terms.parse({component: written}).values()
    assert price_terms.in_words(Component(component), rate) == words


def tiers(*bounds: int | None, scheme: str = "graduated", **more: str) -> dict[str, Any]:
    return {
        "output": {
            "scheme": scheme,
            "tiers": [{"up_to": bound, "price": "1", **more} for bound in bounds],
        }
    }


@pytest.mark.parametrize(
    "written",
    [
        {"input": "0"},
        {"input": "0.000001"},
        {"character": "10000"},  # the highest of a million
        {"request": "100000"},  # the highest of a unit
        {"request": {"scheme": "package", "size": 1, "price": "100000"}},
        {"output": {"price": "1", "free": 0}},
        tiers(None),
        tiers(1, 2, None),
        {"output": {"scheme": "package", "size": 1000, "price": "10000"}},
        {"output": {"price": "1", "free": 10**15}},
        tiers(5, None, flat="0"),
        tiers(5, None, flat="100000"),
        tiers(5, None, scheme="volume"),  # of one price
    ],
)
@pytest.mark.parametrize("discount", [0, 1_000_000])
def test_terms_up_to_their_borders_are_taken(written: dict[str, Any], discount: int) -> None:
    checked(written, discount_ppm=discount)
    assert len(price_terms.parse(written)) == 1


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"character": "10000.000001"}, "price of character: it is implausibly high"),
        ({"request": "100000.000000000001"}, "price of request: it is implausibly high"),
        (
            {"request": {"scheme": "package", "size": 7, "price": "100000.000000000001"}},
            "price of request: it is implausibly high",
        ),
        (
            {"output": {"scheme": "package", "size": 1000, "price": "10000.000000000001"}},
            "price of output: it is implausibly high",
        ),
        (tiers(5, None, flat="100000.000000000001"), "its flat part is implausibly high"),
        ({"output": {"price": "1", "free": 10**15 + 1}}, "it must be at most 1000000000000000"),
        (tiers(10**15 + 1, None), "it must be at most 1000000000000000"),
        ({"request": "-0.000000000001"}, "price of request: it is negative"),
        (tiers(5, None, flat="-0.01"), "price of output: it is negative"),
        (tiers(0, None), "overlap or leave a gap at 0"),
        (tiers(3, 3, None), "overlap or leave a gap at 3"),
        (tiers(None, None), "overlap or leave a gap at None"),
        (tiers(), "the tiers leave a gap above"),
        (tiers(None, 5), "the tiers leave a gap above"),
        (tiers(5, None, scheme="volume", flat="1"), "volume tiers must fall in price"),
        ({"output": {"price": "1", "free": -1}}, "free is -1; it must be a whole number"),
        ({"output": {"price": "1", "free": True}}, "free is True; it must be a whole number"),
        ({"output": {"free": 1}}, "price of output: 'price'"),
        ({"request": 0.5}, "money is never a float"),
    ],
)
def test_terms_beyond_their_borders_are_refused(written: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest) as refused:
        checked(written)
    assert reason in refused.value.message
    assert refused.value.code == "price_refused"


@pytest.mark.parametrize("discount", [-1, 1_000_001])
def test_a_discount_is_0_to_100_percent(discount: int) -> None:
    with pytest.raises(BadRequest, match=r"the discount is"):
        checked({"input": "1"}, discount_ppm=discount)


def test_a_rate_at_each_border_of_its_tiers() -> None:
    """Of 3 free units, up to 10 at 5 with 100 on reaching it, then at 2 with 7."""
    steps = (Tier(10, 5, 100), Tier(None, 2, 7))
    graduated, volume = (Rate(s, steps, free=3) for s in (Scheme.GRADUATED, Scheme.VOLUME))
    flat, package = Rate(Scheme.FLAT, (Tier(None, 5),), free=3), Rate(Scheme.PACKAGE, steps, 4, 3)
    quantities = (0, 3, 4, 7, 8, 13, 14)
    assert [graduated.total(n) for n in quantities] == [0, 0, 105, 120, 125, 150, 159]
    assert [volume.total(n) for n in quantities] == [0, 0, 105, 120, 125, 150, 29]
    assert [flat.total(n) for n in quantities] == [0, 0, 5, 20, 25, 50, 55]
    assert [package.total(n) for n in quantities] == [0, 0, 5, 5, 10, 15, 15]
    assert [each.is_linear for each in (flat, package, graduated, volume)] == [False] * 4
    assert Rate(Scheme.FLAT, (Tier(None, 5),)).is_linear
    assert not Rate(Scheme.GRADUATED, (Tier(None, 5),)).is_linear
    # In the volume tier of 13 or 14 in all, of which 10 or 11 are paid for.
    assert [volume.volume_part(*n, 13) for n in ((0, 2), (0, 5), (2, 2), (5, 8))] == [0, 10, 5, 40]
    assert [volume.volume_part(*n, 14) for n in ((0, 2), (0, 5), (2, 2), (5, 8))] == [0, 4, 2, 16]
    assert volume.volume_part(0, 2, 2) == 0
    assert [graduated.most(n) for n in (0, 1, 2)] == [0, 112, 117]
    assert [package.most(n) for n in (0, 1, 4, 5)] == [0, 5, 5, 10]


def test_a_discounted_price_by_part_and_in_all() -> None:
    made = version(
        {
            "request": {"scheme": "volume", "tiers": [{"up_to": 2, "price": "3"}, {"price": "1"}]},
            "image": "0.000000000003",
            "output": {"price": "1", "free": 2},
            "input": "1",
        },
        discount_ppm=500_000,
    )
    half = 5 * 10**11
    assert [made.total(Component.REQUEST, n) for n in (1, 2, 3)] == [3 * half, 6 * half, 3 * half]
    assert made.part(Component.REQUEST, 1, 1, 3) == half
    assert made.part(Component.REQUEST, 1, 1, 2) == 3 * half
    assert made.part(Component.OUTPUT, 1, 3, 9) == 2 * 500_000
    assert made.part(Component.WAIVED, 0, 5, 5) == 0
    assert made.marginal(Component.OUTPUT, 1, 3) == 2 * 500_000
    # Half of three picounits is no whole number: such a price is not one per unit.
    assert made.linear == {Component.INPUT: 500_000}
    assert [made.total(Component.IMAGE, n) for n in (1, 2)] == [2, 3]
    used = Counts(((Component.INPUT, 4), (Component.OUTPUT, 3), (Component.IMAGE, 1)))
    assert made.cost(used) == 4 * 500_000 + 500_000 + 2
    assert made.cost(Counts(((Component.WAIVED, 9),))) == 0
    assert version({"request": "1"}).total(Component.REQUEST, 1) == 10**12, "no discount"


def test_the_hold_of_a_request_by_its_parts() -> None:
    """Of flat prices the higher one; of any other both, for a part may be priced by either."""
    flat = version({"input": "3", "cached_input": "5", "output": "7", "waived": "2"})
    assert flat.upper_bound(10, 20) == 10 * 5_000_000 + 20 * 7_000_000
    graduated = {"scheme": "graduated", "tiers": [{"up_to": 4, "price": "1"}, {"price": "2"}]}
    mixed = version({"input": "3", "cached_input": graduated, "request": "2", "adapter": "1"})
    tokens, dollar = 10 * 3_000_000 + 10 * 2_000_000, 10**12
    assert mixed.upper_bound(10, 20) == tokens + 3 * dollar
    assert mixed.upper_bound(10, 20, adapter=False) == tokens + 2 * dollar
    assert mixed.upper_bound(0, 0) == 3 * dollar
    free = version({"input": {"price": "3", "free": 100}})
    assert free.upper_bound(10, 0) == 10 * 3_000_000
    used = Counts(((Component.INPUT, 2), (Component.CACHED_INPUT, 3), (Component.REQUEST, 1)))
    assert mixed.most_for(used) == 2 * 3_000_000 + 3 * 2_000_000 + 2 * dollar


TOKENS = (10, 4, 5, 2)
PLAIN = (("input", 6), ("cached_input", 4), ("output", 5), ("waived", 2))


@pytest.mark.parametrize(
    ("kind", "given", "found"),
    [
        ("generation", {}, (*PLAIN, ("request", 1), ("adapter", 0))),
        ("generation", {"adapter": True, "units": 9}, (*PLAIN, ("request", 1), ("adapter", 1))),
        # What was waived of a request that failed has no price.
        (
            "generation",
            {"adapter": True, "answered": 0},
            (*PLAIN[:3], ("waived", 0), ("request", 0), ("adapter", 0)),
        ),
        ("audio", {"units": 9}, (*PLAIN, ("request", 1), ("adapter", 0), ("audio_second", 9))),
        ("speech", {"units": 9}, (*PLAIN, ("request", 1), ("adapter", 0), ("character", 9))),
        ("image", {"units": 9}, (*PLAIN, ("request", 1), ("adapter", 0), ("image", 9))),
        ("image", {}, (*PLAIN, ("request", 1), ("adapter", 0))),
        ("gpu_seconds", {"quantity": 40, "units": 9}, (("gpu_second", 40),)),
        ("gpu_seconds", {}, (("gpu_second", 1),)),
        ("moderation", {"answered": 3, "quantity": 40}, (("moderation", 3),)),
    ],
)
def test_what_counts_of_each_kind(
    kind: str, given: dict[str, Any], found: tuple[tuple[str, int], ...]
) -> None:
    wanted = {"answered": 1, "adapter": False, **given}
    assert counted(kind, TOKENS, **wanted) == found


@pytest.mark.parametrize(("status", "requests"), [(200, 1), (499, 1), (500, 0), (503, 0)])
def test_an_answer_that_failed_at_our_end_pays_no_fee(
    lite: Deployment, status: int, requests: int
) -> None:
    fees = ((Component.REQUEST, requests), (Component.ADAPTER, requests))
    answer = Counts.of_answer(*TOKENS, adapter=True, status=status)
    assert answer.by_component[4:] == fees
    event = lite.event(adapter="lora", status=status, kind=UsageKind.GENERATION)
    assert Counts.of_event(event).by_component[4:] == fees
    batch = lite.event(adapter="lora", status=status, quantity=6)
    assert Counts.of_event(batch).by_component[4] == (Component.REQUEST, 6 * requests)


def test_an_answer_is_a_plain_one_unless_it_is_said() -> None:
    assert Counts.of_answer(10, 4, 5).by_component == (
        *(PLAIN[:3]),
        ("waived", 0),
        ("request", 1),
        ("adapter", 0),
    )


def _priced(name: str, model: str, **fields: Any) -> PriceVersion:
    fields = {"currency": "USD", **fields}
    return PriceVersion(name, rates=MappingProxyType({}), model=model, **fields)


def test_a_price_is_in_force_from_its_first_moment_to_before_its_last() -> None:
    made = _priced("v", "m", effective_from=START, effective_to=START + DAY)
    book = PriceBook((made,))
    for at in (START, START + DAY - INSTANT):
        assert book.pin("acme", "m", None, at, "USD") is made
        assert pricing.in_force(None, START + DAY, at) and pricing.in_force(START, None, at)
    for at in (START - INSTANT, START + DAY):
        with pytest.raises(NotFound) as refused:
            book.pin("acme", "m", None, at, "USD")
        assert refused.value.code == "no_price"


def test_the_price_of_a_cached_answer_or_a_tier_is_the_tenant_s_of_the_model_first() -> None:
    ends = {"effective_to": START + DAY}
    listed = [
        _priced("tenant", "m@cache", tenant_id="acme", **ends),
        _priced("list", "m@cache", **ends),
        _priced("any", "*@cache", effective_to=START + 2 * DAY),
        _priced("model", "m"),
        _priced("flex", "m@flex", effective_from=START),
        _priced("any flex", "*@flex", currency="EUR"),
        _priced("other", "m@other"),
    ]
    book = PriceBook(tuple(listed))

    def cached(tenant: str, at: Any) -> str:
        return book.pin_cached(tenant, "m", "lora", at, "USD").id

    assert [cached(tenant, START) for tenant in ("acme", "beta")] == ["tenant", "list"]
    assert [cached("acme", START + days * DAY) for days in (1, 2)] == ["any", "model"]
    flex, other, early, euro = (
        book.pin_tier("acme", model, tier, at, currency)
        for model, tier, at, currency in (
            ("m", "flex", START, "USD"),
            ("m", "other", START, "USD"),
            ("m", "flex", START - INSTANT, "USD"),
            ("n", "flex", START, "EUR"),
        )
    )
    assert (flex and flex.id, other, early, euro and euro.id) == ("flex", None, None, "any flex")


def test_what_was_not_priced_yet_takes_the_first_price_that_came_after() -> None:
    book = PriceBook(
        (
            _priced("late", "m", effective_from=START + 3 * DAY),
            _priced("euro", "m", effective_from=START + DAY, currency="EUR"),
            _priced("first", "m", effective_from=START + 2 * DAY, effective_to=START + 3 * DAY),
            _priced("always", "k"),
            _priced("older", "n", effective_from=START - DAY, effective_to=START),
        )
    )

    def found(model: str, at: Any) -> str | None:
        version = book.pin_from("acme", model, None, at, "USD")
        return version and version.id

    assert [found("m", START + days * DAY) for days in (0, 2, 3)] == ["first", "first", "late"]
    assert (found("n", START - DAY), found("n", START)) == ("older", None)


def test_the_ranks_that_a_book_remembers_are_bounded() -> None:
    """Names of models come from requests: without a bound a client could fill the memory."""
    made = _priced("any", "*")
    book = PriceBook((made,))
    for number in range(20_000):
        assert book.pin("acme", str(number), None, START, "USD") is made
    assert len(book._ranked) == 20_000
    assert book.pin("acme", "one more", "lora", START, "USD") is made
    assert list(book._ranked) == [("acme", "one more", "lora", "USD")]
