"""From events to charges, ledger and roll-ups: once each, exact, in any order."""

from datetime import timedelta

import pytest
from sqlalchemy import func, select, text

from billing import credits, ledger, rating, reconcile, rollups, usage
from billing.ledger import AccountKind
from billing.models import (
    Charge,
    CreditGrant,
    LedgerEntry,
    ParkedEvent,
    PriceVersionRow,
    UsageBatch,
    UsageEventRow,
)
from billing.pricing import Counts
from core.money import Money
from tests.billing.conftest import House


def test_a_replayed_message_changes_nothing(house: House) -> None:
    events = [house.event() for _ in range(50)]
    assert house.record(*events) == 50
    assert house.record(*events[10:], house.event()) == 1
    assert house.record(*events) == 0
    with house.database.read() as session:
        assert session.scalar(select(func.count()).select_from(UsageEventRow)) == 51
        assert session.scalar(select(func.sum(UsageBatch.events))) == 51


def test_a_charge_is_the_price_times_the_counts(house: House) -> None:
    event = house.event(input_tokens=1000, cached_tokens=400, output_tokens=200, waived_tokens=9)
    house.record(event)
    assert house.rate() == 1
    expected = 600 * 150_000 + 400 * 75_000 + 200 * 600_000
    with house.database.read() as session:
        charge = session.get_one(Charge, event.request_id)
        assert charge.amount == expected == house.version.cost(Counts.of_event(event))
        assert (charge.input_amount, charge.cached_amount) == (600 * 150_000, 400 * 75_000)
        assert charge.output_amount == 200 * 600_000
        assert ledger.balance(session, "acme", AccountKind.RECEIVABLE, "USD") == expected
        assert ledger.balance(session, "acme", AccountKind.REVENUE, "USD") == -expected
        assert session.scalar(select(func.sum(LedgerEntry.units))) == 0


def test_a_batch_is_rated_once(house: House) -> None:
    house.record(*[house.event() for _ in range(20)])
    assert house.rate() == 20
    assert house.rate() == 0
    with house.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Charge)) == 20


def test_rating_that_dies_leaves_nothing_and_is_done_again(house: House) -> None:
    house.record(*[house.event() for _ in range(5)])
    with pytest.raises(RuntimeError, match="killed"), house.database.transaction() as session:
        rating.rate(session, house.clock)
        raise RuntimeError("killed")
    with house.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Charge)) == 0
    assert house.rate() == 5


def test_roll_ups_equal_the_charges_and_a_rebuild_changes_nothing(house: House) -> None:
    for hour in range(5):
        house.record(
            *[
                house.event(project_id=f"p{n % 2}", adapter="pirate" if n % 3 else None)
                for n in range(12)
            ]
        )
        if hour % 2:
            house.rate()
        house.clock.advance(hours=7)
    house.rate()
    with house.database.transaction() as session:
        expected = rollups.anew(session)
        assert rollups.stored(session, rollups.HOURLY) == expected
        daily = rollups.stored(session, rollups.DAILY)
        assert daily == rollups.by_day(expected)
        rollups.rebuild(session)
        assert rollups.stored(session, rollups.HOURLY) == expected
        assert rollups.stored(session, rollups.DAILY) == daily


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"price_version": "price_gone"}, "unknown_price"),
        ({"occurred_at": None}, "future"),
        ({"tenant_id": "euro"}, "currency"),
    ],
)
def test_what_cannot_be_rated_is_parked_with_the_reason(
    house: House, change: dict[str, object], code: str
) -> None:
    house.tenant("euro", currency="EUR")
    if code == "future":
        change = {"occurred_at": house.clock.now() + timedelta(hours=1)}
    event = house.event(**change)
    assert house.record(event, house.event()) == 2
    assert house.record(event) == 0
    assert house.rate() == 1
    with house.database.read() as session:
        (row,) = usage.parked(session)
        assert (row.request_id, row.code) == (event.request_id, code)
        assert row.reason


def test_a_parked_event_is_billed_once_its_time_has_come(house: House) -> None:
    event = house.event(occurred_at=house.clock.now() + timedelta(hours=1))
    house.record(event)
    house.clock.advance(hours=2)
    with house.database.transaction() as session:
        assert usage.release(session, house.clock) == 1
        assert usage.release(session, house.clock) == 0
    assert house.rate() == 1
    with house.database.read() as session:
        assert usage.parked(session) == []
        assert session.get_one(ParkedEvent, event.request_id).released_at is not None


def test_broken_counts_from_another_program_are_parked(lite: House) -> None:
    good = usage._to_json(lite.event())
    bad = {**usage._to_json(lite.event()), "output_tokens": -4}
    half = {**usage._to_json(lite.event()), "input_tokens": 1.5}
    with lite.database.transaction() as session:
        assert usage.record_raw(session, [good, bad, half], lite.clock) == 3
        reasons = {row.request_id: row.reason for row in usage.parked(session)}
    assert set(reasons) == {bad["request_id"], half["request_id"]}
    assert "non-negative integers" in reasons[bad["request_id"]]
    assert "`int`, got `float` - at `$.input_tokens`" in reasons[half["request_id"]]


@pytest.mark.parametrize("table", ["usage_events", "charges", "ledger_entries"])
@pytest.mark.parametrize("verb", ["delete from {}", "update {} set tenant_id = 'x'"])
def test_append_only_rows_refuse_to_change(house: House, table: str, verb: str) -> None:
    if table == "ledger_entries":
        verb = verb.replace("tenant_id = 'x'", "units = 0")
    house.record(house.event())
    house.rate()
    with pytest.raises(Exception, match="append-only"), house.database.transaction() as session:
        session.execute(text(verb.format(table)))


def test_credit_is_used_by_priority_and_expiry_and_pays_what_is_owed(house: House) -> None:
    now = house.clock.now()
    with house.database.transaction() as session:
        for name, kind, units, priority, days in (
            ("late", "prepaid", 10_000_000, 100, None),
            ("soon", "promo", 3_000_000, 100, 5),
            ("first", "promo", 2_000_000, 1, None),
        ):
            credits.grant(
                session,
                tenant_id="acme",
                kind=kind,
                money=Money(units),
                reference=name,
                at=now,
                priority=priority,
                expires_at=now + timedelta(days=days) if days else None,
            )
    house.record(house.event(input_tokens=40, cached_tokens=0, output_tokens=0))
    house.rate()  # 6,000,000
    with house.database.read() as session:
        rows = session.execute(select(CreditGrant.reference, CreditGrant.remaining))
        left = {row[0]: row[1] for row in rows}
        assert left == {"first": 0, "soon": 0, "late": 9_000_000}
        assert ledger.balance(session, "acme", AccountKind.RECEIVABLE, "USD") == 0
        assert ledger.balance(session, "acme", AccountKind.PREPAID, "USD") == -9_000_000
        assert ledger.balance(session, "acme", AccountKind.PROMO, "USD") == 0


def test_an_event_stored_without_a_known_price_is_rated_once_the_price_is_there(
    house: House,
) -> None:
    """Another program may write to the table itself, past the checks of `usage.record`."""
    strange = house.event(price_version="price_strange")
    with house.database.transaction() as session:
        usage._store(session, [usage._row(strange), usage._row(house.event())], house.clock.now())
    assert house.rate() == 2
    with house.database.read() as session:
        assert [row.request_id for row in usage.parked(session)] == [strange.request_id]
        assert reconcile.audit(session).clean
    with house.database.transaction() as session:
        assert rating.release_stored(session, house.clock) == 0
        known = session.get_one(PriceVersionRow, house.version.id)
        fields = {c.name: getattr(known, c.name) for c in PriceVersionRow.__table__.columns}
        strange_price = {**fields, "id": "price_strange", "model": "strange"}
        session.add(PriceVersionRow(**strange_price))
        session.flush()
        assert rating.release_stored(session, house.clock) == 1
        assert rating.release_stored(session, house.clock) == 0
        assert usage.parked(session) == []
    with house.database.read() as session:
        assert session.get_one(Charge, strange.request_id).amount > 0
        report = reconcile.audit(session)
        assert report.clean, report.differences
