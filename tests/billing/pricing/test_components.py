"""Divided usage from the event to the invoice, against books that are kept in fractions here.

The books share nothing with the product but the names of columns: each component is priced by its own
rate, else by the rate that the page of prices names for it, and a line is rounded once.
"""

import shutil
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from billing.audit import reconcile
from billing.exports.subjects import Period
from billing.invoicing import invoice_run
from billing.invoicing.tables import InvoiceLine
from billing.pricing import prices
from billing.rating import price_changes, rerating
from billing.rating.unrated import UnratedUsage
from billing.usage import service_rollups, usage
from billing.usage.tables import (
    Adjustment,
    Charge,
    DailyEngineUsage,
    DailyService,
    DailyUsage,
    HourlyUsage,
)
from core.clock import FakeClock
from core.database import Database
from core.events import Components, UsageEvent, UsageKind
from tests.billing.conftest import START, Deployment, deployment_of
from tests.billing.exports.focus_reading import focus_of

PICO = 10**12
# Dollars a million tokens, and a search or call.
ALL = {
    "input": "3",
    "cached_input": "0.30",
    "output": "15",
    "waived": "0",
    "request": "0.002",
    "cache_write_5m": "3.75",
    "cache_write_1h": "6",
    "audio_input": "10",
    "image_input": "5",
    "reasoning": "12",
    "audio_output": "20",
    "image_output": "30",
    "search": "0.01",
    "tool_call": "0.0025",
}
INPUT = ("cache_write_5m", "cache_write_1h", "audio_input", "image_input")
OUTPUT = ("reasoning", "audio_output", "image_output")
WITHOUT = {  # the rule for a missing price, as the documentation has it
    "cache_write_5m": "input",
    "cache_write_1h": "cache_write_5m",
    "audio_input": "input",
    "image_input": "input",
    "reasoning": "output",
    "audio_output": "output",
    "image_output": "output",
}


@dataclass
class Book:
    """Quantities and dollars by component."""

    rates: dict[str, str]

    def split(self, event: UsageEvent) -> dict[str, int]:
        parts = event.components or Components()
        used = {name: int(getattr(parts, name)) for name in (*INPUT, *OUTPUT)}
        used["input"] = event.input_tokens - event.cached_tokens - sum(used[name] for name in INPUT)
        used["output"] = event.output_tokens - sum(used[name] for name in OUTPUT)
        used |= {"cached_input": event.cached_tokens, "waived": event.waived_tokens}
        used |= {"search": parts.search, "tool_call": parts.tool_call, "request": event.quantity}
        found: dict[str, int] = {}
        for name, count in used.items():
            priced = name
            while priced not in self.rates and priced in WITHOUT:
                priced = WITHOUT[priced]
            found[priced] = found.get(priced, 0) + count
        return found

    def costs(self, event: UsageEvent) -> dict[str, Fraction]:
        ones = ("request", "search", "tool_call")
        return {
            name: count * Fraction(self.rates.get(name, "0")) / (1 if name in ones else 10**6)
            for name, count in self.split(event).items()
        }

    def units(self, event: UsageEvent) -> int:
        whole = sum(self.costs(event).values()) * PICO
        assert whole.denominator == 1
        return int(whole)


@st.composite
def divided(draw: st.DrawFn) -> dict[str, Any]:
    counts = st.integers(0, 5_000)
    parts = {name: draw(counts) if draw(st.booleans()) else 0 for name in (*INPUT, *OUTPUT)}
    cached = draw(counts)
    given = cached + draw(counts) + sum(parts[name] for name in INPUT)
    made = draw(counts) + sum(parts[name] for name in OUTPUT)
    few = st.integers(0, 3)
    return {
        "input_tokens": given,
        "cached_tokens": cached,
        "output_tokens": made,
        "components": Components(**parts, search=draw(few), tool_call=draw(few)),
    }


def lines_of(made: Deployment) -> dict[str, tuple[int, int, int]]:
    """Quantity, picounits and cents of the only invoice's lines of usage."""
    with made.database.read() as session:
        rows = session.scalars(select(InvoiceLine).where(InvoiceLine.kind == "usage")).all()
        return {row.component: (row.quantity, row.exact, row.amount_minor) for row in rows}


def is_clean(made: Deployment) -> bool:
    with made.database.read() as session:
        report = reconcile.audit(session)
    assert report.clean, report
    return True


@settings(max_examples=12, deadline=None)
@given(
    drawn=st.lists(divided(), min_size=1, max_size=6),
    missing=st.sets(st.sampled_from([*WITHOUT, "search", "tool_call"])),
)
def test_invoices_of_drawn_usage_are_those_of_the_books(
    tmp_path_factory: pytest.TempPathFactory,
    migrated_sqlite: Path,
    drawn: list[dict[str, Any]],
    missing: set[str],
) -> None:
    path = tmp_path_factory.mktemp("books") / "books.db"
    shutil.copy(migrated_sqlite, path)
    database = Database(f"sqlite:///{path}")
    try:
        made = deployment_of(database, FakeClock())
        rates = {name: rate for name, rate in ALL.items() if name not in missing}
        made.version, book = made.price(rates, model="claude"), Book(rates)
        events = [made.event(model="claude", **each) for each in drawn] + [
            made.event(model="claude")
        ]
        check_books(made, book, events)
    finally:
        database.close()


def test_invoices_are_those_of_the_books(deployment: Deployment) -> None:
    """On both databases: a price that has every component."""
    deployment.version = deployment.price(ALL, model="claude")
    parts = Components(30, 20, 10, 5, 20, 6, 4, 3, 2)
    events = [
        deployment.event(model="claude", components=parts, engine_id="anthropic"),
        deployment.event(model="claude", components=Components(cache_write_5m=80)),
        deployment.event(model="claude"),
    ]
    check_books(deployment, Book(ALL), events)


def check_books(made: Deployment, book: Book, events: list[UsageEvent]) -> None:
    made.record(*events)
    expected = {each.request_id: book.units(each) for each in events}
    with made.database.read() as session:
        unrated = UnratedUsage()
        unrated.refresh(session, frozenset(("acme",)), prices.load_price_book(session))
        assert unrated.spent({"tenant_id": {"acme"}}, "USD") == sum(expected.values())
    assert made.rate() == len(events)
    service_rollups.sum_all(made.database, made.clock)
    with made.database.read() as session:
        charged = {row.request_id: row.amount for row in session.scalars(select(Charge))}
        assert charged == expected
        for table in (HourlyUsage, DailyUsage, DailyService, DailyEngineUsage):
            sums = session.execute(
                select(
                    func.sum(table.amount),
                    func.sum(table.cache_write_5m_tokens),
                    func.sum(table.reasoning_tokens),
                    func.sum(table.searches),
                )
            ).one()
            parts = [each.components or Components() for each in events]
            assert tuple(map(int, sums)) == (
                sum(expected.values()),
                sum(each.cache_write_5m for each in parts),
                sum(each.reasoning for each in parts),
                sum(each.search for each in parts),
            ), table
    assert is_clean(made)
    made.clock.advance(days=40)
    invoice_run.run(made.database, made.clock, current=False)
    lines = lines_of(made)
    for component in book.rates:
        quantity = sum(book.split(each).get(component, 0) for each in events)
        dollars = sum((book.costs(each).get(component, Fraction()) for each in events), Fraction())
        cents = int(dollars * 100 + Fraction(1, 2))
        if dollars:
            assert lines[component] == (quantity, dollars * PICO, cents), component
    assert sum(exact for _, exact, _ in lines.values()) == sum(expected.values())
    assert is_clean(made)


def test_tiers_of_a_part_and_of_what_prices_it_follow_each_other(lite: Deployment) -> None:
    """Cache writes without a rate count on the tiers of input, in any order."""
    tiers = [{"up_to": 1000, "price": "4"}, {"up_to": None, "price": "2"}]
    lite.version = lite.price({"input": {"scheme": "graduated", "tiers": tiers}, "output": "10"})
    wrote = {"input_tokens": 900, "cached_tokens": 0, "output_tokens": 0}
    lite.record(lite.event(**wrote, components=Components(cache_write_5m=700)))
    lite.record(lite.event(**wrote))
    lite.rate()
    with lite.database.read() as session:
        whole = session.scalar(select(func.sum(Charge.amount)))
    assert whole == 1000 * 4_000_000 + 800 * 2_000_000
    assert is_clean(lite)


def test_usage_that_was_billed_as_input_is_rerated_by_its_components(lite: Deployment) -> None:
    plain = {name: ALL[name] for name in ("input", "cached_input", "output", "request")}
    lite.version = wrong = lite.price(plain, model="claude")
    events = [
        lite.event(model="claude", components=Components(cache_write_5m=50, search=2)),
        lite.event(model="claude"),
    ]
    lite.record(*events)
    lite.rate()
    lite.clock.advance(hours=1)
    right = lite.price(ALL, model="claude")
    wanted = rerating.Request(wrong.id, right.id, START, lite.clock.now())
    with lite.database.transaction() as session:
        changes = rerating.post_all(session, lite.clock, wanted)
    before, after = Book(plain), Book(ALL)
    expected = {
        name: sum(after.costs(each)[name] - before.costs(each).get(name, 0) for each in events)
        * PICO
        for name in after.split(events[0])
    }
    found = {each.component.value: each.difference for each in changes}
    assert found == {name: units for name, units in expected.items() if units}
    with lite.database.read() as session:
        assert session.scalar(select(func.sum(Adjustment.amount))) == sum(expected.values())
    with lite.database.transaction() as session:
        assert rerating.post_all(session, lite.clock, wanted) == []
    assert is_clean(lite)
    lite.clock.advance(days=40)
    invoice_run.run(lite.database, lite.clock, current=False)
    assert is_clean(lite)


def test_focus_has_a_meter_for_each_component(lite: Deployment) -> None:
    lite.version = lite.price(ALL, model="claude")
    lite.record(lite.event(model="claude", components=Components(30, 20, 0, 0, 20, search=2)))
    lite.rate()
    lite.clock.advance(days=40)
    invoice_run.run(lite.database, lite.clock, current=False)
    with lite.database.read() as session:
        rows = focus_of(session, None, Period(START, START + timedelta(days=60)))
    by_meter = {row["SkuMeter"]: row for row in rows if row["ChargeCategory"] == "Usage"}
    used = {name: row["ConsumedQuantity"] // PICO for name, row in by_meter.items()}
    assert by_meter["Cache Write Tokens"]["SkuId"] == "claude/cache_write_5m"
    assert {name: count for name, count in used.items() if name != "Requests"} == {
        "Input Tokens": 30,
        "Cached Input Tokens": 20,
        "Cache Write Tokens": 30,
        "Cache Write Tokens, One Hour": 20,
        "Reasoning Tokens": 20,
        "Output Tokens": 30,
        "Waived Output Tokens": 3,
        "Web Searches": 2,
    }


def test_a_hold_covers_the_dearest_component() -> None:
    from billing.pricing import price_terms
    from billing.pricing.pricing import Counts, PriceVersion

    version = PriceVersion("p", "USD", price_terms.parse(ALL))
    most = version.upper_bound(1000, 100)
    at_most = 1000 * 10_000_000 + 100 * 30_000_000 + 2 * 10**9
    assert most == at_most
    assert version.cost(Counts.of_answer(1000, 0, 100)) < most


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"components": Components(cache_write_5m=81)}, "exceed 80 uncached input"),
        ({"components": Components(reasoning=51)}, "exceed 50 output"),
        ({"components": Components(search=-1)}, "non-negative"),
    ],
)
def test_components_beyond_the_totals_are_refused(
    lite: Deployment, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        lite.event(**changes)


def test_usage_of_a_kind_without_components_is_parked(lite: Deployment) -> None:
    lite.record(lite.event(kind=UsageKind.MODERATION, components=Components(reasoning=1)))
    with lite.database.read() as session:
        (parked,) = usage.parked(session)
    assert parked.code == "invalid" and "components" in parked.reason


def test_a_parked_event_keeps_its_components(lite: Deployment) -> None:
    parts = Components(cache_write_5m=30)
    event = lite.event(occurred_at=lite.clock.now() + timedelta(hours=1), components=parts)
    lite.record(event)
    lite.clock.advance(hours=2)
    with lite.database.transaction() as session:
        assert usage.release(session, lite.clock) == 1
    lite.rate()
    with lite.database.read() as session:
        assert session.scalars(select(Charge.cache_write_5m_tokens)).one() == 30


def test_a_saved_price_keeps_the_rates_of_components(lite: Deployment) -> None:
    lite.price(ALL, model="claude")
    lite.clock.advance(hours=1)
    with lite.database.transaction() as session:
        draft = prices.PriceDraft("claude", {"input": "2"}, lite.clock.now())
        version = price_changes.save(session, lite.clock, draft)
    assert len(version.rates) == len(ALL)
