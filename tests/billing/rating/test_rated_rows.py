"""Charges, parked rows and tier positions as rating stores them, column by column."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount, BillingPeriod
from billing.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from billing.ledger import credits
from billing.ledger.tables import CreditUse, LedgerTransaction
from billing.pricing import price_terms
from billing.pricing.pricing import PER_MILLION, Component, PriceVersion
from billing.pricing.tables import PriceVersionRow
from billing.rating import rating, tiers
from billing.rating.rating import Rated
from billing.rating.tables import TierPosition
from billing.rating.tiers import Positions, Versions, total_of
from billing.usage import service_rollups, usage
from billing.usage.tables import (
    Charge,
    DailyEndUserUsage,
    DailyEngineUsage,
    DailyService,
    HourlyService,
    HourlyUsage,
    ParkedEvent,
    UsageBatch,
)
from core.events import Components, UsageKind
from core.money import Money
from tests.billing.conftest import START, Deployment

DAY = timedelta(days=1)
TOKENS = {"input_tokens": 100, "cached_tokens": 20, "output_tokens": 50, "waived_tokens": 3}
PRICED = {"input": 80, "cached_input": 20, "output": 50, "waived": 3}


@pytest.mark.parametrize(
    ("fields", "counts", "priced"),
    [
        ({}, {"requests": 1}, PRICED | {"request": 1}),
        (
            {"adapter": "lora", "quantity": 2},
            {"requests": 2, "adapter_requests": 2},
            PRICED | {"request": 2, "adapter": 2},
        ),
        ({"adapter": "lora", "status": 500}, {}, PRICED | {"waived": 0}),
        ({"status": 499}, {"requests": 1}, PRICED | {"request": 1}),
        (
            {"kind": UsageKind.AUDIO, "units": 9},
            {"requests": 1, "audio_seconds": 9},
            PRICED | {"request": 1, "audio_second": 9},
        ),
        (
            {"kind": UsageKind.IMAGE, "units": 9},
            {"requests": 1, "images": 9},
            PRICED | {"request": 1, "image": 9},
        ),
        (
            {"kind": UsageKind.SPEECH, "units": 9},
            {"requests": 1, "characters": 9},
            PRICED | {"request": 1, "character": 9},
        ),
        (
            {"kind": UsageKind.GPU_SECONDS, "quantity": 7},
            {"gpu_seconds": 7},
            {"gpu_second": 7},
        ),
        (
            {"kind": UsageKind.MODERATION, "quantity": 7},
            {"moderation_calls": 7},
            {"moderation": 7},
        ),
        ({"kind": UsageKind.MODERATION, "quantity": 7, "status": 500}, {}, {}),
        (
            {"components": Components(30, 20, 10, 5, 20, 6, 4, 3, 2)},
            {
                "requests": 1,
                "cache_write_5m_tokens": 30,
                "cache_write_1h_tokens": 20,
                "audio_input_tokens": 10,
                "image_input_tokens": 5,
                "reasoning_tokens": 20,
                "audio_output_tokens": 6,
                "image_output_tokens": 4,
                "searches": 3,
                "tool_calls": 2,
            },
            {
                "input": 15,
                "cached_input": 20,
                "output": 20,
                "waived": 3,
                "request": 1,
                "cache_write_5m": 30,
                "cache_write_1h": 20,
                "audio_input": 10,
                "image_input": 5,
                "reasoning": 20,
                "audio_output": 6,
                "image_output": 4,
                "search": 3,
                "tool_call": 2,
            },
        ),
    ],
)
def test_a_charge_has_each_count_and_amount_in_its_own_column(
    lite: Deployment, fields: dict[str, Any], counts: dict[str, int], priced: dict[str, int]
) -> None:
    """Component n costs 2 to the n picounits a unit, of tokens and characters as of the others."""
    unit = {component.value: 2**n for n, component in enumerate(Component)}
    terms = {
        name: f"{2**n}e-{6 if name in PER_MILLION else 12}"
        for n, name in enumerate(each.value for each in Component)
    }
    version = lite.price(terms, model="all")
    event = lite.event(model="all", price_version=version.id, **(TOKENS | fields))
    lite.record(event)
    assert lite.rate() == 1
    with lite.database.read() as session:
        row = session.scalars(select(Charge)).one()
        period = session.scalars(select(BillingPeriod.id)).one()
        transactions = session.scalars(select(LedgerTransaction)).all()
    assert {name: getattr(row, name) for name in QUANTITY_COLUMNS} == (
        dict.fromkeys(QUANTITY_COLUMNS, 0) | TOKENS | counts
    )
    amounts = [priced.get(each.value, 0) * unit[each.value] for each in Component]
    expected = dict(zip(AMOUNT_COLUMNS, [*amounts, sum(amounts)], strict=True))
    assert {name: getattr(row, name) for name in AMOUNT_COLUMNS} == expected
    assert (row.request_id, row.tenant_id, row.price_version) == (
        event.request_id,
        "acme",
        version.id,
    )
    assert (row.currency, row.usage_period_id, row.bill_period_id) == ("USD", period, period)
    if not sum(amounts):
        assert transactions == []
        return
    (made,) = transactions
    assert (made.id, made.kind, made.tenant_id) == (row.transaction_id, "usage", "acme")
    assert made.reference == f"rate:1:acme:{period}"


def test_batches_are_rated_in_order_up_to_a_number_of_events_and_of_their_shards(
    lite: Deployment, session: Session
) -> None:
    for _ in range(3):
        usage.record(session, [lite.event(), lite.event()], lite.clock)
    shard = session.scalars(select(UsageBatch.shard)).first()
    assert shard is not None
    assert rating.rate(session, lite.clock, shards=[shard + 1]) == Rated(0, 0)
    assert rating.rate(session, lite.clock, shards=[]) == Rated()
    assert rating.rate(session, lite.clock, most_events=4, shards=[shard]) == Rated(2, 4)
    session.expire_all()
    rated = [each.rated_at for each in session.scalars(select(UsageBatch).order_by(UsageBatch.id))]
    assert rated == [START, START, None]
    assert rating.rate(session, lite.clock) == Rated(1, 2)
    assert rating.rate(session, lite.clock) == Rated(0, 0)
    assert rating.MOST_EVENTS == 20_000


def test_what_has_no_price_is_parked_as_it_is_and_charged_when_it_has_one(
    lite: Deployment, session: Session
) -> None:
    strange, good = lite.event(price_version="later"), lite.event()
    usage._store(session, [strange, good], START)
    assert rating.rate(session, lite.clock) == Rated(1, 1 + 1)
    row = session.scalars(select(ParkedEvent)).one()
    assert (row.request_id, row.tenant_id, row.code) == (
        strange.request_id,
        "acme",
        "unknown_price",
    )
    assert row.reason == "price version 'later' is unknown, or not in the account's currency"
    assert (row.payload, row.parked_at) == ({"request_id": strange.request_id}, START)
    lite.clock.advance(1)
    assert rating.release_stored(session, lite.clock) == 0
    session.expire_all()
    assert session.scalars(select(ParkedEvent.released_at)).one() is None
    row = session.scalars(select(ParkedEvent)).one()
    row.dismissed_by = "ann"
    session.flush()
    _copy_price(session, lite.version, "later")
    assert rating.release_stored(session, lite.clock) == 0, "an operator has dismissed it"
    row.dismissed_by = None
    session.flush()
    assert rating.release_stored(session, lite.clock) == 1
    session.expire_all()
    assert session.scalars(select(ParkedEvent.released_at)).one() == lite.clock.now()
    assert len(session.scalars(select(Charge.request_id)).all()) == 2
    assert rating.release_stored(session, lite.clock) == 0


def _copy_price(session: Session, version: PriceVersion, name: str) -> None:
    known = session.get_one(PriceVersionRow, version.id)
    fields = {c.name: getattr(known, c.name) for c in PriceVersionRow.__table__.columns}
    session.add(PriceVersionRow(**(fields | {"id": name, "model": "strange"})))
    session.flush()


def test_credit_pays_for_usage_as_far_as_it_reaches(lite: Deployment, session: Session) -> None:
    for name, units in (("a", 10_000_000), ("b", 100_000_000)):
        credits.grant(
            session, tenant_id="acme", kind="promo", money=Money(units), reference=name, at=START
        )
    usage.record(session, [lite.event(), lite.event(tenant_id="beta")], lite.clock)
    rating.rate(session, lite.clock)
    uses = session.scalars(select(CreditUse).order_by(CreditUse.id)).all()
    assert [(u.tenant_id, u.purpose, u.units, u.kind) for u in uses] == [
        ("acme", "usage", 10_000_000, "promo"),
        ("acme", "usage", 33_500_000, "promo"),
    ]
    charge = session.scalars(select(Charge).where(Charge.tenant_id == "acme")).one()
    for use in uses:
        assert (use.transaction_id, use.at) == (charge.transaction_id, START)
        assert use.bill_period_id == charge.bill_period_id


def version(name: str, terms: dict[str, Any], day: int | None, tenant_id: str = "") -> PriceVersion:
    at = None if day is None else START + day * DAY
    rates = price_terms.parse(terms)
    return PriceVersion(name, "USD", rates, tenant_id=tenant_id, model="m", effective_from=at)


GRADUATED = {"scheme": "graduated", "tiers": [{"up_to": 10, "price": "4"}, {"price": "1"}]}


def test_versions_share_one_position_in_the_order_in_which_they_came_into_force() -> None:
    first = version("z", {"output": GRADUATED}, None)
    then = version("b", {"output": GRADUATED}, 1)
    same_day = version("a", {"output": GRADUATED}, 1)
    used = [(then, 5), (first, 8), (same_day, 4)]
    # 8 at 4, then of "a" 2 at 4 and 2 at 1, then 5 at 1.
    assert total_of(Component.OUTPUT, used) == (8 + 2) * 4_000_000 + (2 + 5) * 1_000_000
    volume = {"scheme": "volume", "tiers": [{"up_to": 10, "price": "4"}, {"price": "1"}]}
    made = version("v", {"output": volume}, 2)
    assert total_of(Component.OUTPUT, [(first, 8), (made, 2)]) == 10 * 4_000_000
    assert total_of(Component.OUTPUT, [(first, 8), (made, 3)]) == 8 * 4_000_000 + 3 * 1_000_000
    assert total_of(Component.OUTPUT, []) == 0
    assert tiers.scope_of(first) == ("m", "*", "USD")


def test_a_component_is_linear_where_no_version_of_its_position_has_tiers() -> None:
    listed = version("list", {"output": "2", "input": "3", "waived": GRADUATED}, 0)
    own = version("own", {"output": GRADUATED, "input": "5"}, 1, "acme")
    other = version("other", {"input": GRADUATED}, 1, "beta")
    scope = tiers.scope_of(listed)
    made = Versions({each.id: each for each in (listed, own)}, {scope: [listed, own, other]})
    assert [each.id for each in made.sharing("acme", listed)] == ["list", "own"]
    assert [each.id for each in made.sharing("gamma", listed)] == ["list"]
    assert [each.id for each in made.sharing("gamma", own)] == ["list", "own"]
    free = dict.fromkeys(Component, 0)
    for tenant_id, expected in (
        ("acme", {Component.INPUT: 3_000_000}),
        ("gamma", {Component.INPUT: 3_000_000, Component.OUTPUT: 2_000_000}),
    ):
        found = made.linear(tenant_id, listed)
        left_out = {Component.WAIVED} | ({Component.OUTPUT} if tenant_id == "acme" else set())
        assert found == {c: n for c, n in (free | expected).items() if c not in left_out}
        assert made.linear(tenant_id, listed) is found
    assert Component.INPUT not in made.linear("beta", listed)


def test_a_position_is_read_advanced_and_stored(lite: Deployment, session: Session) -> None:
    only = version("only", {"output": GRADUATED}, 0)
    versions = Versions({"only": only}, {tiers.scope_of(only): [only]})
    for period_id, component, quantity in (
        *(("per_1", "output", 7), ("per_1", "input", 90)),
        *(("per_0", "output", 50), ("per_2", "waived", 60)),
    ):
        row = {"usage_period_id": period_id, "component": component, "tenant_id": "acme"}
        session.add(TierPosition(price_version="only", quantity=quantity, **row))
    session.flush()
    positions = Positions(session, versions)
    charged = [positions.charge("acme", "per_1", only, Component.OUTPUT, n) for n in (2, 2)]
    assert charged == [8_000_000, 4_000_000 + 1_000_000]
    assert positions.charge("acme", "per_2", only, Component.OUTPUT, 3) == 12_000_000
    positions.store()
    rows = select(TierPosition).order_by(TierPosition.usage_period_id, TierPosition.component)
    session.expire_all()
    assert [(r.usage_period_id, r.component, r.quantity) for r in session.scalars(rows)] == [
        ("per_0", "output", 50),
        ("per_1", "input", 90),
        ("per_1", "output", 11),
        ("per_2", "output", 3),
        ("per_2", "waived", 60),
    ]
    Positions(session, versions).store()


def test_usage_that_another_program_stored_makes_the_account_of_its_tenant(
    lite: Deployment, session: Session
) -> None:
    stored = lite.event(tenant_id="stranger")
    usage._store(session, [stored], START)
    assert session.get(BillingAccount, "stranger") is None
    assert rating.rate(session, lite.clock) == Rated(1, 1)
    account = session.get_one(BillingAccount, "stranger")
    assert (account.currency, account.created_at) == ("USD", START)
    assert session.scalars(select(Charge.tenant_id)).one() == "stranger"


@pytest.mark.parametrize(
    "others",
    [(), ({"kind": UsageKind.AUDIO, "units": 9},), ({"components": Components(reasoning=20)},)],
)
def test_roll_ups_sum_every_column_of_the_charges_of_a_batch(
    lite: Deployment, others: tuple[dict[str, Any], ...]
) -> None:
    """Columns that a batch's charges leave at zero are not summed."""
    events = [lite.event(**TOKENS, **fields) for fields in ({}, *others)]
    lite.record(*events)
    lite.rate()
    service_rollups.sum_all(lite.database, lite.clock)
    columns = (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)
    tables = (HourlyService, DailyService, DailyEngineUsage, DailyEndUserUsage, HourlyUsage)
    with lite.database.read() as session:
        charges = session.scalars(select(Charge)).all()
        wanted = {name: sum(getattr(each, name) for each in charges) for name in columns}
        for table in tables:
            rows = session.scalars(select(table)).all()
            assert wanted == {name: sum(getattr(row, name) for row in rows) for name in columns}
    assert len(charges) == len(events) and wanted["requests"]
    assert wanted["audio_seconds"] + wanted["reasoning_tokens"] in ({0} if not others else {9, 20})
