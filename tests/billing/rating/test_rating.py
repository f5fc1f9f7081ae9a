"""From events to charges, ledger and roll-ups: once each, exact, in any order."""

import re
from datetime import timedelta

import pytest
from sqlalchemy import func, select, text

from billing.audit import reconcile
from billing.ledger import credits, ledger
from billing.ledger.ledger import AccountKind
from billing.ledger.tables import CreditGrant, LedgerEntry
from billing.pricing.pricing import Counts
from billing.pricing.tables import PriceVersionRow
from billing.rating import rating
from billing.usage import rollups, usage
from billing.usage.tables import Charge, ParkedEvent, UsageBatch, UsageEventRow
from core.events import UsageKind
from core.money import Money, units_of
from tests.billing.conftest import Deployment


def test_a_replayed_message_changes_nothing(deployment: Deployment) -> None:
    events = [deployment.event() for _ in range(50)]
    assert deployment.record(*events) == 50
    assert deployment.record(*events[10:], deployment.event()) == 1
    assert deployment.record(*events) == 0
    with deployment.database.read() as session:
        assert session.scalar(select(func.count()).select_from(UsageEventRow)) == 51
        assert session.scalar(select(func.sum(UsageBatch.events))) == 51


def test_a_charge_is_the_price_times_the_counts(deployment: Deployment) -> None:
    event = deployment.event(
        input_tokens=1000, cached_tokens=400, output_tokens=200, waived_tokens=9
    )
    deployment.record(event)
    assert deployment.rate() == 1
    expected = 600 * 150_000 + 400 * 75_000 + 200 * 600_000
    with deployment.database.read() as session:
        charge = session.get_one(Charge, event.request_id)
        assert charge.amount == expected == deployment.version.cost(Counts.of_event(event))
        assert (charge.input_amount, charge.cached_amount) == (600 * 150_000, 400 * 75_000)
        assert charge.output_amount == 200 * 600_000
        assert ledger.balance(session, "acme", AccountKind.RECEIVABLE, "USD") == expected
        assert ledger.balance(session, "acme", AccountKind.REVENUE, "USD") == -expected
        assert session.scalar(select(func.sum(LedgerEntry.units))) == 0


def test_a_batch_is_rated_once(deployment: Deployment) -> None:
    deployment.record(*[deployment.event() for _ in range(20)])
    assert deployment.rate() == 20
    assert deployment.rate() == 0
    with deployment.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Charge)) == 20


def test_rating_that_dies_leaves_nothing_and_is_done_again(deployment: Deployment) -> None:
    deployment.record(*[deployment.event() for _ in range(5)])
    with pytest.raises(RuntimeError, match="killed"), deployment.database.transaction() as session:
        rating.rate(session, deployment.clock)
        raise RuntimeError("killed")
    with deployment.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Charge)) == 0
    assert deployment.rate() == 5


def test_roll_ups_equal_the_charges_and_a_rebuild_changes_nothing(deployment: Deployment) -> None:
    for hour in range(5):
        deployment.record(
            *[
                deployment.event(project_id=f"p{n % 2}", adapter="pirate" if n % 3 else None)
                for n in range(12)
            ]
        )
        if hour % 2:
            deployment.rate()
        deployment.clock.advance(hours=7)
    deployment.rate()
    with deployment.database.transaction() as session:
        expected = rollups.recompute(session)
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
    deployment: Deployment, change: dict[str, object], code: str
) -> None:
    deployment.tenant("euro", currency="EUR")
    if code == "future":
        change = {"occurred_at": deployment.clock.now() + timedelta(hours=1)}
    event = deployment.event(**change)
    assert deployment.record(event, deployment.event()) == 2
    assert deployment.record(event) == 0
    assert deployment.rate() == 1
    with deployment.database.read() as session:
        (row,) = usage.parked(session)
        assert (row.request_id, row.code) == (event.request_id, code)
        assert row.reason


def test_a_parked_event_is_billed_once_its_time_has_come(deployment: Deployment) -> None:
    event = deployment.event(occurred_at=deployment.clock.now() + timedelta(hours=1))
    deployment.record(event)
    deployment.clock.advance(hours=2)
    with deployment.database.transaction() as session:
        assert usage.release(session, deployment.clock) == 1
        assert usage.release(session, deployment.clock) == 0
    assert deployment.rate() == 1
    with deployment.database.read() as session:
        assert usage.parked(session) == []
        assert session.get_one(ParkedEvent, event.request_id).released_at is not None


def test_broken_counts_from_another_program_are_parked(lite: Deployment) -> None:
    good = usage._to_json(lite.event())
    bad = {**usage._to_json(lite.event()), "output_tokens": -4}
    half = {**usage._to_json(lite.event()), "input_tokens": 1.5}
    naive = {**usage._to_json(lite.event()), "finished_at": "2026-01-01T00:00:01"}
    long = {**usage._to_json(lite.event()), "model": "m" * 5_000}
    with lite.database.transaction() as session:
        assert usage.record_raw(session, [good, bad, half, naive, long], lite.clock) == 5
        reasons = {row.request_id: row.reason for row in usage.parked(session)}
    wrong = (bad, half, naive, long)
    assert set(reasons) == {each["request_id"] for each in wrong}
    assert "not a usage event: model is longer than" in reasons[long["request_id"]]
    assert reasons[naive["request_id"]] == "not a usage event: finished_at has no time zone"
    assert "non-negative integers" in reasons[bad["request_id"]]
    assert "`int`, got `float` - at `$.input_tokens`" in reasons[half["request_id"]]


def test_what_has_no_usable_id_is_parked_under_its_digest(lite: Deployment) -> None:
    ids: list[object] = [5, "", "r" * 41, None, ["x"], "r" * 40]
    payloads = [{"request_id": each, "tenant_id": "acme"} for each in ids] + ["no object"]
    with lite.database.transaction() as session:
        assert usage.record_raw(session, payloads, lite.clock) == len(payloads)
        assert usage.record_raw(session, payloads, lite.clock) == 0, "the same digest again"
        found = [(row.request_id, row.tenant_id) for row in usage.parked(session)]
    assert ("r" * 40, "acme") in found
    derived = [(name, tenant) for name, tenant in found if name != "r" * 40]
    assert all(re.fullmatch(r"invalid-[0-9a-f]{32}", name) for name, _ in derived)
    assert sorted(tenant for _, tenant in derived) == ["", *["acme"] * 5]


@pytest.mark.parametrize("table", ["usage_events", "charges", "ledger_entries"])
@pytest.mark.parametrize("verb", ["delete from {}", "update {} set tenant_id = 'x'"])
def test_append_only_rows_refuse_to_change(deployment: Deployment, table: str, verb: str) -> None:
    if table == "ledger_entries":
        verb = verb.replace("tenant_id = 'x'", "units = 0")
    deployment.record(deployment.event())
    deployment.rate()
    with (
        pytest.raises(Exception, match="append-only"),
        deployment.database.transaction() as session,
    ):
        session.execute(text(verb.format(table)))


def test_credit_is_used_by_priority_and_expiry_and_pays_what_is_owed(
    deployment: Deployment,
) -> None:
    now = deployment.clock.now()
    with deployment.database.transaction() as session:
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
    deployment.record(deployment.event(input_tokens=40, cached_tokens=0, output_tokens=0))
    deployment.rate()  # 6,000,000
    with deployment.database.read() as session:
        rows = session.execute(select(CreditGrant.reference, CreditGrant.remaining))
        left = {row[0]: row[1] for row in rows}
        assert left == {"first": 0, "soon": 0, "late": 9_000_000}
        assert ledger.balance(session, "acme", AccountKind.RECEIVABLE, "USD") == 0
        assert ledger.balance(session, "acme", AccountKind.PREPAID, "USD") == -9_000_000
        assert ledger.balance(session, "acme", AccountKind.PROMO, "USD") == 0


def test_an_event_stored_without_a_known_price_is_rated_once_the_price_is_there(
    deployment: Deployment,
) -> None:
    """Another program may write to the table itself, past the checks of `usage.record`."""
    strange = deployment.event(price_version="price_strange")
    with deployment.database.transaction() as session:
        usage._store(session, [strange, deployment.event()], deployment.clock.now())
    assert deployment.rate() == 2
    with deployment.database.read() as session:
        assert [row.request_id for row in usage.parked(session)] == [strange.request_id]
        assert reconcile.audit(session).differences == ()
    with deployment.database.transaction() as session:
        assert rating.release_stored(session, deployment.clock) == 0
        known = session.get_one(PriceVersionRow, deployment.version.id)
        fields = {c.name: getattr(known, c.name) for c in PriceVersionRow.__table__.columns}
        strange_price = {**fields, "id": "price_strange", "model": "strange"}
        session.add(PriceVersionRow(**strange_price))
        session.flush()
        assert rating.release_stored(session, deployment.clock) == 1
        assert rating.release_stored(session, deployment.clock) == 0
        assert usage.parked(session) == []
    with deployment.database.read() as session:
        assert session.get_one(Charge, strange.request_id).amount > 0
        report = reconcile.audit(session)
        assert report.clean, report.differences


def test_each_kind_of_usage_counts_its_own_quantity(lite: Deployment) -> None:
    none = {"input_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "waived_tokens": 0}
    asked = {
        "generated": lite.event(adapter="lora"),
        "failed": lite.event(adapter="lora", status=503),
        "gpu": lite.event(kind=UsageKind.GPU_SECONDS, quantity=7, **none),
        "moderated": lite.event(kind=UsageKind.MODERATION, quantity=2, **none),
        "moderation failed": lite.event(kind=UsageKind.MODERATION, quantity=2, status=500, **none),
    }
    lite.record(*asked.values())
    assert lite.rate() == 5
    with lite.database.read() as session:
        charges = {name: session.get_one(Charge, each.request_id) for name, each in asked.items()}
    counted = {
        name: (each.requests, each.adapter_requests, each.gpu_seconds, each.moderation_calls)
        for name, each in charges.items()
    }
    assert counted == {
        "generated": (1, 1, 0, 0),
        "failed": (0, 0, 0, 0),
        "gpu": (0, 0, 7, 0),
        "moderated": (0, 0, 0, 2),
        "moderation failed": (0, 0, 0, 0),
    }


def test_usage_after_parked_usage_is_rated_and_counted_without_it(lite: Deployment) -> None:
    lite.record(lite.event(price_version="price_unknown"), lite.event(), lite.event())
    with lite.database.transaction() as session:
        rated = rating.rate(session, lite.clock)
    assert (rated.batches > 0, rated.events) == (True, 2), "what has no price waits parked"
    with lite.database.transaction() as session:
        assert rating.release_stored(session, lite.clock) == 0
        assert rating.rate(session, lite.clock) == rating.Rated(0, 0)


@pytest.mark.parametrize(
    ("status", "dollars"), [(200, "0.25"), (499, "0.25"), (500, "0"), (503, "0")]
)
def test_a_fee_per_request_is_owed_for_all_but_our_own_failures(
    lite: Deployment, status: int, dollars: str
) -> None:
    price = lite.price({"request": "0.25"}, model="fee")
    event = lite.event(model="fee", price_version=price.id, status=status)
    assert price.cost(Counts.of_event(event)) == units_of(dollars), "what the gateway settles"
    lite.record(event)
    lite.rate()
    with lite.database.read() as session:
        assert session.scalars(select(Charge.amount)).one() == units_of(dollars)
