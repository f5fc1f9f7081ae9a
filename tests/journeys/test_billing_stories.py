"""Money's stories on a fake clock, each told from the first use to settled books."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from billing import (
    budgets,
    credit_notes,
    credits,
    invoice_run,
    invoices,
    ledger,
    reconcile,
    rerating,
    settlement,
    subscriptions,
)
from billing.accounts import ensure_account
from billing.documents import invoice_json
from billing.ledger import AccountKind
from billing.models import Plan
from core.clock import FakeClock
from core.database import Database
from core.money import Money, units_of
from core.tenants import keys
from core.tenants.organisations import create_project, create_tenant
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import House, house_of


@pytest.fixture
def house(sqlite_database: Database) -> House:
    return house_of(sqlite_database, FakeClock(datetime(2028, 1, 10, 9, 30, tzinfo=UTC)))


def closed(house: House, days: int = 40) -> list[dict[str, Any]]:
    """Time passes, invoices are run, and the books are audited."""
    house.clock.advance(days=days)
    result = invoice_run.run(house.database, house.clock)
    assert not result.failed
    with house.database.read() as session:
        report = reconcile.audit(session)
        assert report.clean, report.differences
        return [invoice_json(session, invoices.get(session, each)) for each in result.finalised]


def pay(house: House, invoice_id: str, minor: int, reference: str) -> str:
    with house.database.transaction() as session:
        invoice = invoices.get(session, invoice_id)
        payment = settlement.begin_payment(
            session,
            tenant_id=invoice.tenant_id,
            invoice_id=invoice.id,
            amount_minor=minor,
            currency=invoice.currency,
            provider="manual",
            reference=reference,
            at=house.clock.now(),
        )
        settlement.succeed(session, payment, house.clock.now())
        return payment.id


def test_from_the_first_key_to_a_paid_invoice(house: House) -> None:
    clock = house.clock
    with house.database.transaction() as session:
        tenant = create_tenant(session, clock, name="newcomer")
        scope = scope_of_operator(tenant.id)
        project = create_project(session, scope, clock, name="chat")
        key = keys.issue(session, scope, clock, project_id=project.id, name="first", role="owner")
        key_id = key.key.id if hasattr(key, "key") else key.id
    events = [
        house.event(
            tenant_id=tenant.id,
            project_id=project.id,
            key_id=key_id,
            input_tokens=200_000,
            cached_tokens=50_000 * n,
            output_tokens=400_000,
        )
        for n in range(3)
    ]
    house.record(*events)
    (document,) = closed(house)
    assert document["usage"]["prompt_tokens"] == 600_000
    assert document["usage"]["cached_tokens"] == 150_000
    assert document["by_project"][0]["project"] == "chat"
    pay(house, document["id"], document["due"]["minor"], "wire")
    with house.database.read() as session:
        assert invoices.get(session, document["number"]).status == "paid"
        assert ledger.balance(session, tenant.id, AccountKind.RECEIVABLE, "USD") == 0
    assert closed(house) == []


def test_late_events_across_the_end_of_a_period(house: House) -> None:
    house.clock.set(datetime(2028, 1, 31, 23, 59, tzinfo=UTC))
    in_time, held, too_late = (house.event(output_tokens=1_000_000) for _ in range(3))
    house.record(in_time)
    house.clock.advance(hours=12)
    house.record(held)  # within the grace period
    house.clock.advance(hours=13)
    invoice_run.run(house.database, house.clock)
    house.record(too_late)
    house.rate()
    (february,) = closed(house)
    with house.database.read() as session:
        january = invoice_json(session, invoices.get(session, "TH-000001"))
    assert january["usage"]["completion_tokens"] == 2_000_000
    assert february["usage"]["completion_tokens"] == 1_000_000
    assert {line["kind"] for line in february["lines"]} == {"late_usage"}


def test_an_upgrade_in_the_middle_of_a_leap_month(house: House) -> None:
    house.clock.set(datetime(2028, 2, 1, tzinfo=UTC))
    with house.database.transaction() as session:
        for name, fee in (("small", "29"), ("large", "58")):
            fees = {"base_fee": units_of(fee), "currency": "USD"}
            session.add(Plan(id=name, name=name, created_at=house.clock.now(), **fees))
        session.flush()
        subscriptions.subscribe(session, "acme", "small", house.clock.now())
    house.clock.advance(days=14)
    with house.database.transaction() as session:
        subscriptions.subscribe(session, "acme", "large", house.clock.now())
    february, *_ = closed(house)
    parts = [line["exact"]["amount"] for line in february["lines"]]
    assert parts == ["14", "30"]  # 14 of 29 days, then 15 of 29
    assert february["period_end"].startswith("2028-03-01")


def test_a_clock_change_neither_loses_nor_doubles_an_hour(house: House) -> None:
    house.tenant("berlin", timezone="Europe/Berlin")
    house.clock.set(datetime(2028, 2, 29, 22, 30, tzinfo=UTC))
    sent = 0
    while house.clock.now() < datetime(2028, 4, 1, 12, tzinfo=UTC):
        house.record(house.event(tenant_id="berlin", output_tokens=1, waived_tokens=0))
        sent += 1
        house.clock.advance(hours=1)
    documents = {each["period_start"][:10]: each for each in closed(house, days=40)}
    counts = {start: each["usage"]["completion_tokens"] for start, each in documents.items()}
    assert sum(counts.values()) == sent
    # March in Berlin has 31 days less the hour that the clocks skip.
    assert counts["2028-02-29"] == 31 * 24 - 1


def test_a_wrong_price_is_found_and_put_right_on_the_next_invoice(house: House) -> None:
    wrong = house.price({"output": "6.00"}, model="slip")
    for _ in range(3):
        house.record(house.event(model="slip", price_version=wrong.id, output_tokens=1_000_000))
    (january,) = closed(house)
    assert january["total"]["text"] == "18.00"
    right = house.price({"output": "0.60"}, model="slip")
    wanted = rerating.Request(
        wrong.id, right.id, datetime(2028, 1, 1, tzinfo=UTC), datetime(2028, 2, 1, tzinfo=UTC)
    )
    with house.database.transaction() as session:
        (change,) = rerating.post_all(session, house.clock, wanted)
        assert change.difference == -units_of("16.2")
        assert rerating.post_all(session, house.clock, wanted) == []
    house.record(house.event(output_tokens=50_000_000, input_tokens=0, cached_tokens=0))
    (february,) = closed(house)
    assert february["total"]["text"] == "13.80"
    adjusted = next(line for line in february["lines"] if line["kind"] == "adjustment")
    assert "2028-01-01 to 2028-02-01" in adjusted["description"]


def test_a_refund_with_a_credit_note_leaves_nothing_open(house: House) -> None:
    house.record(house.event(output_tokens=20_000_000, input_tokens=0, cached_tokens=0))
    (document,) = closed(house)
    payment_id = pay(house, document["id"], document["due"]["minor"], "card")
    now = house.clock.now()
    with house.database.transaction() as session:
        note = credit_notes.issue(
            session,
            invoice_id=document["id"],
            net_minor=500,
            reason="an outage",
            reference="outage",
            at=now,
            refund=True,
        )
        assert note.label == "TH-CN-000001"
        from billing.models import Payment

        payment = session.get_one(Payment, payment_id)
        settlement.refund(session, payment, 500, "outage", now)
        assert settlement.open_minor(invoices.get(session, document["id"])) == 0
        assert ledger.balance(session, "acme", AccountKind.CASH, "USD") == units_of("7")
    assert closed(house) == []


def test_a_prepaid_tenant_s_limit_follows_the_wallet(house: House) -> None:
    with house.database.transaction() as session:
        ensure_account(session, "acme", house.clock.now()).prepaid_only = True
        credits.grant(
            session,
            tenant_id="acme",
            kind="prepaid",
            money=Money(units_of("10")),
            reference="first",
            at=house.clock.now(),
        )

    def _left() -> int:
        with house.database.read() as session:
            (limit,) = budgets.money_limits(session, "acme", "proj", "key", house.clock.now())
            return limit.cap_units - limit.spent_units

    assert _left() == units_of("10")
    house.record(house.event(output_tokens=10_000_000, input_tokens=0, cached_tokens=0))
    house.rate()
    assert _left() == units_of("4")
    (document,) = closed(house)
    assert (document["due"]["minor"], document["status"]) == (0, "paid")
    assert document["prepaid"]["text"] == "6.00"
    house.clock.advance(timedelta(days=1).total_seconds())
    assert _left() == units_of("4")
