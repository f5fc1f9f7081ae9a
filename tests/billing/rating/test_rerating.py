"""What a re-rating changes, row by row, and which usage is in its range; every amount is by hand."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingPeriod
from billing.ledger.tables import LedgerTransaction
from billing.pricing import prices
from billing.pricing.pricing import PriceVersion
from billing.rating import rating, rerating
from billing.rating.rerating import Change, Request
from billing.rating.tables import Rerate
from billing.usage import usage
from billing.usage.tables import Adjustment
from core.clock import FakeClock
from core.errors import BadRequest
from tests.billing.conftest import START, Deployment

DAY, INSTANT = timedelta(days=1), timedelta(microseconds=1)
TOKENS = {"cached_tokens": 0, "waived_tokens": 0}
FEE = 10**10  # a cent


@pytest.fixture
def versions(lite: Deployment) -> tuple[PriceVersion, PriceVersion]:
    """5 and 1 a million tokens and a cent a request; then 2 a million and nothing else."""
    wrong = lite.price({"output": "5", "input": "1", "request": "0.01"}, model="slip")
    right = lite.price({"output": "2"}, model="slip", effective_from=START + DAY / 2)
    lite.tenant("beta")
    lite.clock.set(START + 3 * DAY)
    return wrong, right


def used(session: Session, made: Deployment, version: PriceVersion, *rows: dict[str, Any]) -> None:
    plain = {"model": "slip", "price_version": version.id, "occurred_at": START, **TOKENS}
    plain |= {"input_tokens": 0}
    usage.record(session, [made.event(**(plain | row)) for row in rows], made.clock)
    rating.rate(session, made.clock)


def shown(changes: list[Change]) -> list[tuple[Any, ...]]:
    return sorted(
        (c.tenant_id, c.project_id, c.component.value, c.quantity, c.before, c.after)
        for c in changes
    )


def test_each_project_and_component_changes_by_its_own_usage_in_the_range(
    lite: Deployment, versions: tuple[PriceVersion, PriceVersion], session: Session
) -> None:
    wrong, right = versions
    end = START + 2 * DAY
    used(
        session,
        lite,
        wrong,
        {"output_tokens": 300},
        {"output_tokens": 0, "input_tokens": 40, "status": 503, "occurred_at": end - INSTANT},
        {"output_tokens": 700, "project_id": "other"},
        {"output_tokens": 1, "occurred_at": end},
        {"output_tokens": 9, "tenant_id": "beta"},
    )
    used(session, lite, right, {"output_tokens": 5, "occurred_at": START + DAY})
    wanted = Request(wrong.id, right.id, START, end, reason="a slip", actor="ann")
    changes = rerating.plan(session, wanted)
    assert {(c.model, c.currency) for c in changes} == {("slip", "USD")}
    acme = [
        ("acme", "other", "output", 700, 700 * 5_000_000, 700 * 2_000_000),
        ("acme", "other", "request", 1, FEE, 0),
        ("acme", "proj", "input", 40, 40 * 1_000_000, 0),
        ("acme", "proj", "output", 300, 300 * 5_000_000, 300 * 2_000_000),
        ("acme", "proj", "request", 1, FEE, 0),
    ]
    beta = [
        ("beta", "proj", "output", 9, 9 * 5_000_000, 9 * 2_000_000),
        ("beta", "proj", "request", 1, FEE, 0),
    ]
    assert shown(changes) == acme + beta
    assert shown(rerating.plan(session, replace(wanted, tenant_id="beta"))) == beta
    later = replace(wanted, starts_at=START + INSTANT, ends_at=end + INSTANT)
    assert shown(rerating.plan(session, later)) == [
        ("acme", "proj", "input", 40, 40 * 1_000_000, 0),
        ("acme", "proj", "output", 1, 1 * 5_000_000, 1 * 2_000_000),
        ("acme", "proj", "request", 1, FEE, 0),
    ]
    assert session.scalars(select(Rerate)).all() == [], "a plan writes nothing"


def test_a_posted_change_has_its_adjustment_and_its_ledger_transaction(
    lite: Deployment, versions: tuple[PriceVersion, PriceVersion], session: Session
) -> None:
    wrong, right = versions
    used(
        session, lite, wrong, {"output_tokens": 300}, {"output_tokens": 300, "project_id": "other"}
    )
    lite.clock.set(START + 40 * DAY)
    wanted = Request(wrong.id, right.id, START, START + DAY, "acme", "told too late.", "ann")
    posted = rerating.post_all(session, lite.clock, wanted)
    assert len(posted) == 4
    (made,) = session.scalars(select(Rerate))
    assert (made.from_version, made.to_version, made.tenant_id) == (wrong.id, right.id, "acme")
    assert (made.starts_at, made.ends_at, made.posted_at) == (START, START + DAY, lite.clock.now())
    assert (made.posted_by, made.note) == ("ann", "told too late.")
    rows = session.scalars(select(Adjustment).order_by(Adjustment.project_id, Adjustment.component))
    periods = {p.id: p.starts_at for p in session.scalars(select(BillingPeriod))}
    text = "price corrected for 2026-01-01 to 2026-02-01. told too late."
    found = list(rows)
    assert [(r.project_id, r.component, r.quantity, r.amount, r.reason) for r in found] == [
        ("other", "output", 300, -900_000_000, f"slip, output: {text}"),
        ("other", "request", 1, -FEE, f"slip, request: {text}"),
        ("proj", "output", 300, -900_000_000, f"slip, output: {text}"),
        ("proj", "request", 1, -FEE, f"slip, request: {text}"),
    ]
    for number, row in enumerate(sorted(found, key=lambda each: each.id)):
        assert (row.tenant_id, row.model, row.currency) == ("acme", "slip", "USD")
        assert (row.rerate_id, row.created_at) == (made.id, lite.clock.now())
        assert periods[row.usage_period_id] == START
        assert periods[row.bill_period_id] <= START + 31 * DAY
        booked = session.get_one(LedgerTransaction, row.transaction_id)
        assert (booked.kind, booked.reference) == ("adjustment", f"rerate:{made.id}:{number}")
    assert rerating.post_all(session, lite.clock, wanted) == [], "it is corrected already"
    assert len(session.scalars(select(Rerate)).all()) == 1


def test_a_reason_is_not_needed(
    lite: Deployment, versions: tuple[PriceVersion, PriceVersion], session: Session
) -> None:
    wrong, right = versions
    used(session, lite, wrong, {"output_tokens": 1, "status": 500})
    (change,) = rerating.post_all(
        session, lite.clock, Request(wrong.id, right.id, START, START + DAY)
    )
    assert (change.difference, change.quantity) == (-3_000_000, 1)
    row = session.scalars(select(Adjustment)).one()
    assert row.reason == "slip, output: price corrected for 2026-01-01 to 2026-02-01."


def test_a_tier_that_projects_share_is_paid_once(lite: Deployment, session: Session) -> None:
    """At 4 a million; right is 2 up to 500 tokens and then 1. What is not moved keeps its place in the
    tiers, so that the whole is 500 at 2 and 600 at 1, and 100 of it were charged at the right price."""
    wrong = lite.price({"output": "4"}, model="slip")
    tiers = [{"up_to": 500, "price": "2"}, {"up_to": None, "price": "1"}]
    terms = {"output": {"scheme": "graduated", "tiers": tiers}}
    right = lite.price(terms, model="slip", effective_from=START + DAY)
    lite.clock.set(START + 3 * DAY)
    used(
        session,
        lite,
        wrong,
        {"output_tokens": 300, "project_id": "small"},
        {"output_tokens": 700, "project_id": "large"},
    )
    used(session, lite, right, {"output_tokens": 100, "occurred_at": START + DAY})
    changes = rerating.plan(session, Request(wrong.id, right.id, START, START + DAY))
    by_project = {each.project_id: each for each in changes}
    assert {name: each.before for name, each in by_project.items()} == {
        "small": 300 * 4_000_000,
        "large": 700 * 4_000_000,
    }
    charged = 1000 * 4_000_000 + 100 * 1_000_000
    whole = 500 * 2_000_000 + 600 * 1_000_000
    assert sum(each.difference for each in changes) == whole - charged


def test_a_newer_correction_of_the_same_usage_replaces_the_older_one(
    lite: Deployment, versions: tuple[PriceVersion, PriceVersion], session: Session
) -> None:
    wrong, right = versions
    third = lite.price({"output": "3"}, model="slip", effective_from=START + 2 * DAY)
    outside = {"output_tokens": 100, "status": 500, "occurred_at": START + DAY}
    used(session, lite, wrong, {"output_tokens": 100, "status": 500}, outside)
    first = Request(wrong.id, right.id, START, START + DAY)
    assert [c.difference for c in rerating.post_all(session, lite.clock, first)] == [-300_000_000]
    lite.clock.advance(1)
    wider = Request(wrong.id, third.id, START - DAY, START + DAY)
    (change,) = rerating.post_all(session, lite.clock, wider)
    assert (change.before, change.after) == (200_000_000, 300_000_000)
    assert rerating.plan(session, wider) == []


def test_a_re_rating_stays_in_one_currency_and_goes_forward(
    lite: Deployment, versions: tuple[PriceVersion, PriceVersion], session: Session
) -> None:
    wrong, right = versions
    euros = euro_price(session, lite.clock)
    with pytest.raises(BadRequest, match=f"{wrong.id} is in USD, {euros} in EUR"):
        rerating.plan(session, Request(wrong.id, euros, START, START + DAY))
    for end in (START, START - INSTANT):
        with pytest.raises(BadRequest, match="is not after starts_at 2026-01-01"):
            rerating.plan(session, Request(wrong.id, right.id, START, end))
    assert rerating.plan(session, Request(wrong.id, right.id, START, START + INSTANT)) == []


def euro_price(session: Session, clock: FakeClock) -> str:
    draft = prices.PriceDraft("slip", {"output": "1"}, START, currency="EUR")
    return prices.save(session, clock, draft).id


def test_each_kind_of_usage_is_corrected_by_its_own_component(
    lite: Deployment, session: Session
) -> None:
    """GPU seconds and moderation calls have no other component, whatever the terms say of those."""
    names = ("gpu_second", "moderation", "request", "audio_second")
    wrong = lite.price(dict.fromkeys(names, "0.02") | {"input": "1"}, model="slip")
    right = lite.price(
        dict.fromkeys(names, "0.03") | {"input": "2"}, model="slip", effective_from=START + DAY
    )
    lite.clock.set(START + 2 * DAY)
    none = {"output_tokens": 0}
    used(
        session,
        lite,
        wrong,
        {"kind": "gpu_seconds", "quantity": 4, **none, "input_tokens": 30},
        {"kind": "moderation", "quantity": 5, **none},
        {"kind": "audio", "units": 6, **none},
    )
    changes = rerating.plan(session, Request(wrong.id, right.id, START, START + DAY))
    assert shown(changes) == [
        ("acme", "proj", name, n, n * 2 * FEE, n * 3 * FEE)
        for name, n in (("audio_second", 6), ("gpu_second", 4), ("moderation", 5), ("request", 1))
    ]


def test_a_part_of_an_earlier_range_is_refused_for_the_tenants_that_it_was_of(
    lite: Deployment, versions: tuple[PriceVersion, PriceVersion], session: Session
) -> None:
    wrong, right = versions
    used(session, lite, wrong, {"output_tokens": 1})
    first = Request(wrong.id, right.id, START, START + 2 * DAY, "acme")
    assert rerating.post_all(session, lite.clock, first)
    part = replace(first, ends_at=START + DAY)
    for tenant_id, refused in (("acme", True), ("", True), ("beta", False)):
        expected = pytest.raises(BadRequest, match="partly overlaps") if refused else nullcontext()
        with expected:
            rerating.plan(session, replace(part, tenant_id=tenant_id))
    for start, end in ((START - DAY, START), (START + 2 * DAY, START + 3 * DAY)):
        rerating.plan(session, replace(first, starts_at=start, ends_at=end))
    rerating.plan(session, replace(first, starts_at=START - DAY, ends_at=START + 3 * DAY))
    for start, end in (
        (START - DAY, START + INSTANT),
        (START + 2 * DAY - INSTANT, START + 3 * DAY),
    ):
        with pytest.raises(BadRequest, match="partly overlaps"):
            rerating.plan(session, replace(first, starts_at=start, ends_at=end))
