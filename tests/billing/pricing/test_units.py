"""Usage in seconds of audio, spoken characters and images, from the event to the invoice."""

import hashlib
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select

from billing.archive import frozen_sums
from billing.audit import reconcile
from billing.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from billing.exports.subjects import Period
from billing.invoicing import invoice_run
from billing.invoicing.tables import InvoiceLine
from billing.pricing import prices
from billing.pricing.pricing import Component, Counts
from billing.rating.unrated import UnratedUsage
from billing.usage import usage
from billing.usage.tables import Charge
from core.errors import BadRequest
from core.events import UsageEvent, UsageKind
from core.money import PICO
from tests.billing.conftest import START, Deployment
from tests.billing.exports.focus_reading import focus_of

# Dollars a second, a million characters and an image, and 2 cents a request.
WRITTEN = {"audio_second": "0.0001", "character": "15", "image": "0.04", "request": "0.02"}
NONE = {"input_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "waived_tokens": 0}
# Kind, units, status -> picounits by hand.
USED = [
    (UsageKind.AUDIO, 61, 200, 61 * PICO // 10_000 + PICO // 50),
    (UsageKind.SPEECH, 4_096, 200, 4_096 * 15 * PICO // 10**6 + PICO // 50),
    (UsageKind.IMAGE, 3, 200, 3 * PICO // 25 + PICO // 50),
    (UsageKind.IMAGE, 0, 503, 0),
]


def events_of(made: Deployment, **changes: Any) -> list[UsageEvent]:
    return [
        made.event(kind=kind, units=units, status=status, **(NONE | changes))
        for kind, units, status, _ in USED
    ]


def test_units_are_charged_rolled_up_and_invoiced(deployment: Deployment) -> None:
    deployment.version = deployment.price(WRITTEN)
    events = events_of(deployment)
    deployment.record(*events)
    with deployment.database.read() as session:
        book = prices.load_price_book(session)
        unrated = UnratedUsage()
        unrated.refresh(session, frozenset(("acme",)), book)
        whole = sum(cost for *_, cost in USED)
        assert unrated.spent({"tenant_id": {"acme"}}, "USD") == whole
    assert deployment.rate() == 4
    with deployment.database.read() as session:
        charges = [session.get_one(Charge, each.request_id) for each in events]
    assert [each.amount for each in charges] == [cost for *_, cost in USED]
    counted = [(each.audio_seconds, each.characters, each.images) for each in charges]
    assert counted == [(61, 0, 0), (0, 4_096, 0), (0, 0, 3), (0, 0, 0)]
    assert [each.requests for each in charges] == [1, 1, 1, 0]
    deployment.clock.advance(days=40)
    invoice_run.run(deployment.database, deployment.clock, current=False)
    with deployment.database.read() as session:
        lines = session.scalars(select(InvoiceLine).order_by(InvoiceLine.position)).all()
        found = {(each.component, each.unit, each.quantity): each.exact for each in lines}
        report = reconcile.audit(session)
        period = Period(START, START + timedelta(days=40))
        rows = focus_of(session, None, period)
    assert {key: exact for key, exact in found.items() if key[0] not in ("request", "")} == {
        ("audio_second", "seconds", 61): 61 * PICO // 10_000,
        ("character", "characters", 4_096): 4_096 * 15 * PICO // 10**6,
        ("image", "images", 3): 3 * PICO // 25,
    }
    assert report.clean, report.differences
    units = {row["ConsumedUnit"]: row["ConsumedQuantity"] for row in rows if row["ConsumedUnit"]}
    assert {name: units[name] // PICO for name in ("Seconds", "Characters", "Images")} == {
        "Seconds": 61,
        "Characters": 4_096,
        "Images": 3,
    }


def test_tiers_of_a_unit_belong_to_the_period(lite: Deployment) -> None:
    tiers = [{"up_to": 100, "price": "0.01"}, {"up_to": None, "price": "0.001"}]
    lite.version = lite.price({"audio_second": {"scheme": "graduated", "tiers": tiers}})
    lite.record(lite.event(kind=UsageKind.AUDIO, units=90, **NONE))
    lite.record(lite.event(kind=UsageKind.AUDIO, units=30, **NONE))
    lite.rate()
    with lite.database.read() as session:
        amounts = sorted(row.amount for row in session.scalars(select(Charge)))
        assert amounts == [10 * PICO // 100 + 20 * PICO // 1000, 90 * PICO // 100]
        assert reconcile.audit(session).clean


def test_the_hold_covers_the_units_at_any_tier(lite: Deployment) -> None:
    tiers = [{"up_to": 100, "price": "0.01"}, {"up_to": None, "price": "0.001"}]
    version = lite.price({"audio_second": {"scheme": "graduated", "tiers": tiers}, "request": "1"})
    counts = Counts(((Component.AUDIO_SECOND, 30), (Component.REQUEST, 1)))
    assert version.most_for(counts) == 30 * PICO // 100 + PICO


def test_units_of_a_kind_without_them_are_parked(lite: Deployment) -> None:
    lite.record(lite.event(units=5))
    with lite.database.read() as session:
        (parked,) = usage.parked(session)
    assert parked.code == "invalid" and "5" in parked.reason
    with pytest.raises(ValueError, match="units"):
        lite.event(kind=UsageKind.AUDIO, units=-1)


def test_a_price_of_characters_is_written_per_million(lite: Deployment) -> None:
    version = lite.price({"character": "15"})
    assert version.rates[Component.CHARACTER].tiers[0].unit == 15 * PICO // 10**6
    with pytest.raises(BadRequest, match="character"):
        lite.price({"character": "0.0000001"})


def test_days_that_were_closed_before_units_existed_keep_their_digest() -> None:
    """The digest of a row that has the columns of the older version alone."""
    old_quantities, old_amounts = QUANTITY_COLUMNS[:8], (*AMOUNT_COLUMNS[:8], "amount")
    key = ("acme", "period", "period", "price", True)
    old = (*key, *range(1, 1 + len(old_quantities) + len(old_amounts)))
    of = dict(zip((*old_quantities, *old_amounts), old[5:], strict=True))
    new = (*key, *(of.get(name, 0) for name in (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)))

    expected = hashlib.sha256(repr([str(value) for value in old]).encode()).hexdigest()
    assert frozen_sums.Groups([new], []).digest() == expected
    changed = (*new[:13], 1, *new[14:])
    assert frozen_sums.Groups([changed], []).digest() != expected
