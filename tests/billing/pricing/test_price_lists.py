"""Price lists of others: each field by hand, with a mark-up, and what an import changes."""

import json
from fractions import Fraction
from typing import Any

import pytest
from sqlalchemy import func, select

from billing.pricing import price_lists, prices
from billing.pricing.price_lists import Listed
from billing.pricing.pricing import PriceBook
from billing.pricing.tables import PriceVersionRow
from billing.rating import price_imports
from billing.rating.price_imports import Terms
from core.errors import BadRequest
from tests.billing.conftest import START, Deployment

LITELLM = """{
  "sample_spec": {"input_cost_per_token": 0.0},
  "claude": {
    "input_cost_per_token": 3e-06, "output_cost_per_token": 1.5e-05,
    "input_cost_per_token_above_200k_tokens": 6e-06,
    "output_cost_per_token_above_200k_tokens": 2.25e-05,
    "cache_creation_input_token_cost": 3.75e-06,
    "cache_creation_input_token_cost_above_1hr": 6e-06,
    "cache_read_input_token_cost": 3e-07,
    "input_cost_per_token_batches": 1.5e-06, "output_cost_per_token_batches": 7.5e-06,
    "input_cost_per_token_priority": 6e-06,
    "search_context_cost_per_query": {"search_context_size_medium": 0.01},
    "input_cost_per_video_per_second": 0.002,
    "max_tokens": 64000, "mode": "chat"
  },
  "text-embedding": {"input_cost_per_token": 1e-07, "output_cost_per_token": 0.0}
}"""
PLAIN = {
    "input": "3",
    "output": "15",
    "cache_write_5m": "3.75",
    "cache_write_1h": "6",
    "cached_input": "0.3",
    "search": "0.01",
}
OPENROUTER = {
    "data": [
        {
            "id": "anthropic/claude",
            "pricing": {
                "prompt": "0.000003",
                "completion": "0.000015",
                "request": "0",
                "image": "0.0048",
                "web_search": "0.01",
                "input_cache_read": "0.0000003",
                "input_cache_write": "0.00000375",
            },
        },
        {"id": "openrouter/auto", "pricing": {"prompt": "-1", "completion": "-1"}},
    ]
}


def terms_of(percent: str = "0") -> Terms:
    return Terms(price_lists.percent_of(percent), START, "imported", "operator")


def test_litellms_list_is_read_field_by_field() -> None:
    found = {each.model: each for each in price_lists.parse(LITELLM)}
    assert found["claude"].rates == PLAIN
    assert found["claude"].left_out == ("input_cost_per_video_per_second",)
    long = {"input": "6", "output": "22.5"}
    assert found["claude@above-200000"].rates == PLAIN | long
    assert found["claude@batch"].rates == PLAIN | {"input": "1.5", "output": "7.5"}
    assert found["claude@priority"].rates == PLAIN | {"input": "6"}
    assert found["text-embedding"].rates == {"input": "0.1", "output": "0"}
    assert "sample_spec" not in found


def test_openrouters_models_are_read_and_one_without_a_price_of_its_own_is_not() -> None:
    (found,) = price_lists.parse(json.dumps(OPENROUTER))
    assert found.rates == {
        "input": "3",
        "output": "15",
        "cached_input": "0.3",
        "cache_write_5m": "3.75",
        "search": "0.01",
    }
    assert found.left_out == ("image",)


def test_a_mark_up_is_exact_and_that_of_a_row_comes_first() -> None:
    tiers = {"scheme": "graduated", "tiers": [{"up_to": 1000, "price": "3"}, {"price": "1"}]}
    text = json.dumps(
        {
            "prices": [
                {"model": "a", "rates": {"input": "3", "search": "0.01"}},
                {"model": "b", "rates": {"input": tiers}, "mark_up": "50%"},
            ]
        }
    )
    a, b = price_lists.parse(text)
    assert price_lists.marked_up(a, Fraction(20)) == {"input": "3.6", "search": "0.012"}
    raised = price_lists.marked_up(b, Fraction(20))["input"]
    assert [each["price"] for each in raised["tiers"]] == ["4.5", "1.5"]
    assert raised["tiers"][0]["up_to"] == 1000
    # A third of a picounit a token is rounded up to a whole one.
    third = Listed("c", {"input": "0.000001"})
    assert price_lists.marked_up(third, Fraction(100, 3)) == {"input": "0.000002"}


def test_a_region_has_its_own_rows() -> None:
    text = json.dumps(
        {
            "prices": [
                {"model": "a", "rates": {"input": "3"}},
                {"model": "a", "rates": {"input": "3.3"}, "region": "eu"},
                {"model": "b", "rates": {"input": "1"}},
            ]
        }
    )
    listed = price_lists.parse(text)
    of = {
        region: {
            each.model: each.rates["input"]
            for each in price_lists.chosen(listed, models={}, region=region)
        }
        for region in ("", "eu", "us")
    }
    assert of == {
        "": {"a": "3", "b": "1"},
        "eu": {"a": "3.3", "b": "1"},
        "us": {"a": "3", "b": "1"},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not JSON"),
        ("{}", "not recognized"),
        ('{"prices": [{"rates": {}}]}', "no model"),
        ('{"prices": [{"model": "a", "rates": {"input": "1"}, "cost": 1}]}', "has cost"),
        ('{"prices": [{"model": "a"}]}', "no rates"),
        ('{"a": {"input_cost_per_token": -2}}', "price of input"),
        ('{"data": [{"id": "a", "pricing": {"prompt": "cheap"}}]}', "'cheap'"),
        (json.dumps({"prices": [{"model": "a", "rates": {"input": "1"}}] * 2}), "twice"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        price_lists.parse(text)
    assert caught.value.next_step


@pytest.mark.parametrize("text", ["", "much", "-100", "1e9", "nan"])
def test_a_mark_up_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="mark-up"):
        price_lists.percent_of(text)


def test_an_import_saves_what_differs_once(lite: Deployment) -> None:
    listed = price_lists.chosen(price_lists.parse(LITELLM), models={"claude": "c"}, region="")
    assert [each.model for each in listed] == ["c", "c@above-200000", "c@batch", "c@priority"]
    with lite.database.read() as session:
        assert [each.before for each in price_imports.compare(session, listed, terms_of("20"))] == [
            *[None] * 4
        ]
    for expected in (4, 0):
        with lite.database.transaction() as session:
            changes = price_imports.save(session, lite.clock, listed, terms_of("20%"))
        assert sum(each.differs for each in changes) == expected
    with lite.database.read() as session:
        book = prices.load_price_book(session)
        row = PriceVersionRow
        assert session.scalar(select(func.count()).where(row.model.startswith("c"))) == 4
    of = {
        name: found.model if found else None
        for name, found in {
            "plain": book.pin("acme", "c", None, START, "USD"),
            "short": book.pin_long("acme", "c", 200_000, START, "USD"),
            "long": book.pin_long("acme", "c", 200_001, START, "USD"),
            "other": book.pin_long("acme", "demo", 200_001, START, "USD"),
            "batch": book.pin_batch("acme", "c", START, "USD"),
            "priority": book.pin_tier("acme", "c", "priority", START, "USD"),
        }.items()
    }
    assert of == {
        "plain": "c",
        "short": None,
        "long": "c@above-200000",
        "other": None,
        "batch": "c@batch",
        "priority": "c@priority",
    }


def test_a_changed_list_begins_new_versions_and_shows_each_component(lite: Deployment) -> None:
    listed = price_lists.parse(json.dumps(OPENROUTER))
    with lite.database.transaction() as session:
        price_imports.save(session, lite.clock, listed, terms_of())
    lite.clock.advance(days=1)
    dearer: dict[str, Any] = json.loads(json.dumps(OPENROUTER))
    dearer["data"][0]["pricing"] |= {"prompt": "0.000004", "web_search": "0"}
    later = Terms(Fraction(0), lite.clock.now(), "again", "operator")
    with lite.database.transaction() as session:
        (change,) = price_imports.save(
            session, lite.clock, price_lists.parse(json.dumps(dearer)), later
        )
    assert change.components() == [("input", "3", "4"), ("search", "0.01", None)]
    with lite.database.read() as session:
        book = prices.load_price_book(session)
    name = "anthropic/claude"
    assert len(book.pin("acme", name, None, START, "USD").rates) == 5
    assert len(book.pin("acme", name, None, lite.clock.now(), "USD").rates) == 4


def test_of_a_list_with_one_wrong_price_nothing_is_saved(lite: Deployment) -> None:
    text = json.dumps(
        {
            "prices": [
                {"model": "a", "rates": {"input": "1"}},
                {"model": "b", "rates": {"nothing": "1"}},
            ]
        }
    )
    with (
        pytest.raises(BadRequest, match="b: The price is invalid: 'nothing'"),
        lite.database.transaction() as session,
    ):
        price_imports.save(session, lite.clock, price_lists.parse(text), terms_of())
    with lite.database.read() as session:
        assert {each.model for each in prices.load_price_book(session).versions} == {"demo"}


def test_a_book_without_long_prices_looks_for_none() -> None:
    assert PriceBook(()).pin_long("acme", "m", 10**9, START, "USD") is None
