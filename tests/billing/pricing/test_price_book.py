"""The stored price book: what ends what, what overlaps, and what a price cannot be."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from billing.pricing import prices
from billing.pricing.pricing import PriceVersion
from billing.pricing.tables import PriceVersionRow
from core.errors import BadRequest, Conflict, NotFound
from tests.billing.conftest import START, Deployment

DAY, MOMENT = timedelta(days=1), timedelta(microseconds=1)


def _save(session: Session, lite: Deployment, start: datetime, **fields: Any) -> PriceVersion:
    written = fields.pop("written", {"output": "1"})
    draft = prices.PriceDraft(fields.pop("model", "m"), written, start, **fields)
    return prices.save(session, lite.clock, draft)


def _end(session: Session, version: PriceVersion) -> datetime | None:
    return session.get_one(PriceVersionRow, version.id).effective_to


def test_a_price_ends_the_open_one_before_it_and_overlaps_none(
    session: Session, lite: Deployment
) -> None:
    first = _save(session, lite, START, note="a", created_by="ann")
    row = session.get_one(PriceVersionRow, first.id)
    assert (row.note, row.created_by, row.created_at, row.adapter) == ("a", "ann", START, "*")
    other = [
        _save(session, lite, START, model="m2"),
        _save(session, lite, START, adapter="pirate"),
        _save(session, lite, START, currency="EUR"),
        _save(session, lite, START, tenant_id="acme"),
    ]
    second = _save(session, lite, START + 2 * DAY, effective_to=START + 4 * DAY)
    assert (_end(session, first), _end(session, second)) == (START + 2 * DAY, START + 4 * DAY)
    assert [_end(session, each) for each in other] == [None] * 4
    for start, end in (
        (START + 3 * DAY, None),
        (START + 3 * DAY, START + 5 * DAY),
        (START + 4 * DAY - MOMENT, None),
        (START - DAY, START + MOMENT),
    ):
        with pytest.raises(Conflict, match="The price overlaps version") as told:
            _save(session, lite, start, effective_to=end)
        assert told.value.code == "price_overlap"
    before = _save(session, lite, START - DAY, effective_to=START)
    after = _save(session, lite, START + 4 * DAY)
    assert (_end(session, before), _end(session, after)) == (START, None)
    with pytest.raises(Conflict, match="in force from 2026-01-05 to no end date"):
        _save(session, lite, START + 4 * DAY)


def test_what_a_price_cannot_be(session: Session, lite: Deployment) -> None:
    for end in (START, START - DAY):
        with pytest.raises(BadRequest, match="is not after effective_from 2026-01-01"):
            _save(session, lite, START, effective_to=end)
    assert _save(session, lite, START, effective_to=START + MOMENT, adapter="").adapter == "*"
    with pytest.raises(
        BadRequest, match="The price is in EUR, but the tenant is billed in USD"
    ) as told:
        _save(session, lite, START, tenant_id="acme", currency="EUR")
    assert (told.value.param, told.value.code) == ("currency", "price_refused")
    for percent, ppm in (("0.0001", 1), ("12.5", 125_000), ("99", 990_000)):
        draft = prices.PriceDraft("m", {"output": "1"}, START, discount_percent=percent)
        assert prices.validate(draft).discount_ppm == ppm
    with pytest.raises(BadRequest, match="more than four decimals"):
        prices.validate(prices.PriceDraft("m", {"output": "1"}, START, discount_percent="0.00001"))
    base = _save(session, lite, START, model="base")
    with pytest.raises(BadRequest, match="A discount needs a tenant"):
        prices.discount(session, lite.clock, prices.PriceDraft("base", {}, START), base)
    draft = prices.PriceDraft("base", {}, START, tenant_id="acme", discount_percent="20")
    own = prices.discount(session, lite.clock, draft, base)
    assert (own.rates, own.discount_ppm, own.tenant_id) == (base.rates, 200_000, "acme")
    assert prices.get_version(session, own.id) == own
    with pytest.raises(NotFound, match="There is no price version 'pv_x'"):
        prices.get_version(session, "pv_x")


def test_a_price_of_the_configuration_yields_to_one_by_hand(
    session: Session, lite: Deployment
) -> None:
    def _ensure(output: str, note: str = "config") -> PriceVersion:
        lite.clock.advance(hours=1)
        return prices.ensure_price(session, lite.clock, "own", {"output": output}, note)

    first = _ensure("1")
    assert first.effective_from == datetime(2000, 1, 1, tzinfo=UTC)
    assert _ensure("1.0").id == first.id, "as it was"
    second = _ensure("2")
    assert (second.effective_from, _end(session, first)) == (lite.clock.now(),) * 2
    assert _ensure("2").id == second.id
    lite.clock.advance(hours=1)
    by_hand = _save(session, lite, lite.clock.now(), model="own", note="by hand")
    assert _ensure("3").id == by_hand.id
    fresh = prices.ensure_default_prices(session, lite.clock, "fresh")
    assert prices.ensure_price(session, lite.clock, "fresh", {"output": "9"}, "c").id != fresh.id


def test_the_price_of_a_model_that_nobody_set(session: Session, lite: Deployment) -> None:
    made = prices.ensure_default_prices(session, lite.clock, "fresh")
    row = session.get_one(PriceVersionRow, made.id)
    kept = (
        row.effective_from,
        row.note,
        row.currency,
        row.tenant_id,
        row.adapter,
        row.effective_to,
    )
    assert kept == (datetime(2000, 1, 1, tzinfo=UTC), "default price", "USD", "", "*", None)
    units = {component.value: rate.tiers[0].unit for component, rate in made.rates.items()}
    assert {name: unit for name, unit in units.items() if unit} == {
        "input": 150_000,
        "cached_input": 75_000,
        "output": 600_000,
        "gpu_second": 800_000_000,
        "moderation": 100_000_000,
    }
    assert prices.ensure_default_prices(session, lite.clock, "fresh").id == made.id
