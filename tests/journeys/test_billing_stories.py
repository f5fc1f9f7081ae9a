"""Money's stories on a fake clock, each told from the first use to settled books."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from billing.accounts.accounts import ensure_account
from billing.audit import reconcile
from billing.invoicing import credit_notes, invoice_run, invoices, open_amounts
from billing.invoicing.views import invoice_json
from billing.ledger import credits, ledger
from billing.ledger.ledger import AccountKind
from billing.notices import budgets
from billing.payments import settlement
from billing.rating import rerating
from billing.rating.unrated import UnratedUsage
from billing.subscriptions import subscriptions
from billing.subscriptions.tables import Plan
from core.clock import FakeClock
from core.database import Database
from core.money import Money, units_of
from core.tenants import keys
from core.tenants.organisations import create_project, create_tenant
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import Deployment, deployment_of


@pytest.fixture
def deployment(sqlite_database: Database) -> Deployment:
    return deployment_of(sqlite_database, FakeClock(datetime(2028, 1, 10, 9, 30, tzinfo=UTC)))


def closed(deployment: Deployment, days: int = 40) -> list[dict[str, Any]]:
    """Time passes, invoices are run, and the books are audited."""
    deployment.clock.advance(days=days)
    result = invoice_run.run(deployment.database, deployment.clock)
    assert not result.failed
    with deployment.database.read() as session:
        report = reconcile.audit(session)
        assert report.clean, report.differences
        return [invoice_json(session, invoices.get(session, each)) for each in result.finalised]


def pay(deployment: Deployment, invoice_id: str, minor: int, reference: str) -> str:
    with deployment.database.transaction() as session:
        invoice = invoices.get(session, invoice_id)
        payment = settlement.begin_payment(
            session,
            tenant_id=invoice.tenant_id,
            invoice_id=invoice.id,
            amount_minor=minor,
            currency=invoice.currency,
            provider="manual",
            reference=reference,
            at=deployment.clock.now(),
        )
        settlement.succeed(session, payment, deployment.clock.now())
        return payment.id


def test_from_the_first_key_to_a_paid_invoice(deployment: Deployment) -> None:
    clock = deployment.clock
    with deployment.database.transaction() as session:
        tenant = create_tenant(session, clock, name="newcomer")
        scope = scope_of_operator(tenant.id)
        project = create_project(session, scope, clock, name="chat")
        key = keys.issue(session, scope, clock, project_id=project.id, name="first", role="owner")
        key_id = key.key.id if hasattr(key, "key") else key.id
    events = [
        deployment.event(
            tenant_id=tenant.id,
            project_id=project.id,
            key_id=key_id,
            input_tokens=200_000,
            cached_tokens=50_000 * n,
            output_tokens=400_000,
        )
        for n in range(3)
    ]
    deployment.record(*events)
    (document,) = closed(deployment)
    assert document["usage"]["prompt_tokens"] == 600_000
    assert document["usage"]["cached_tokens"] == 150_000
    assert document["by_project"][0]["project"] == "chat"
    pay(deployment, document["id"], document["due"]["minor"], "wire")
    with deployment.database.read() as session:
        assert invoices.get(session, document["number"]).status == "paid"
        assert ledger.balance(session, tenant.id, AccountKind.RECEIVABLE, "USD") == 0
    assert closed(deployment) == []


def test_late_events_across_the_end_of_a_period(deployment: Deployment) -> None:
    deployment.clock.set(datetime(2028, 1, 31, 23, 59, tzinfo=UTC))
    in_time, held, too_late = (deployment.event(output_tokens=1_000_000) for _ in range(3))
    deployment.record(in_time)
    deployment.clock.advance(hours=12)
    deployment.record(held)  # within the grace period
    deployment.clock.advance(hours=13)
    invoice_run.run(deployment.database, deployment.clock)
    deployment.record(too_late)
    deployment.rate()
    (february,) = closed(deployment)
    with deployment.database.read() as session:
        january = invoice_json(session, invoices.get(session, "TH-000001"))
    assert january["usage"]["completion_tokens"] == 2_000_000
    assert february["usage"]["completion_tokens"] == 1_000_000
    assert {line["kind"] for line in february["lines"]} == {"late_usage"}


def test_an_upgrade_in_the_middle_of_a_leap_month(deployment: Deployment) -> None:
    deployment.clock.set(datetime(2028, 2, 1, tzinfo=UTC))
    with deployment.database.transaction() as session:
        for name, fee in (("small", "29"), ("large", "58")):
            fees = {"base_fee": units_of(fee), "currency": "USD"}
            session.add(Plan(id=name, name=name, created_at=deployment.clock.now(), **fees))
        session.flush()
        subscriptions.subscribe(session, "acme", "small", deployment.clock.now())
    deployment.clock.advance(days=14)
    with deployment.database.transaction() as session:
        subscriptions.subscribe(session, "acme", "large", deployment.clock.now())
    february, *_ = closed(deployment)
    parts = [line["exact"]["amount"] for line in february["lines"]]
    assert parts == ["14", "30"]  # 14 of 29 days, then 15 of 29
    assert february["period_end"].startswith("2028-03-01")


def test_a_clock_change_neither_loses_nor_doubles_an_hour(deployment: Deployment) -> None:
    deployment.tenant("berlin", timezone="Europe/Berlin")
    deployment.clock.set(datetime(2028, 2, 29, 22, 30, tzinfo=UTC))
    sent = 0
    while deployment.clock.now() < datetime(2028, 4, 1, 12, tzinfo=UTC):
        deployment.record(deployment.event(tenant_id="berlin", output_tokens=1, waived_tokens=0))
        sent += 1
        deployment.clock.advance(hours=1)
    documents = {each["period_start"][:10]: each for each in closed(deployment, days=40)}
    counts = {start: each["usage"]["completion_tokens"] for start, each in documents.items()}
    assert sum(counts.values()) == sent
    # March in Berlin has 31 days less the hour that the clocks skip.
    assert counts["2028-02-29"] == 31 * 24 - 1


def test_a_wrong_price_is_found_and_put_right_on_the_next_invoice(deployment: Deployment) -> None:
    wrong = deployment.price({"output": "6.00"}, model="slip")
    for _ in range(3):
        deployment.record(
            deployment.event(model="slip", price_version=wrong.id, output_tokens=1_000_000)
        )
    (january,) = closed(deployment)
    assert january["total"]["text"] == "18.00"
    right = deployment.price({"output": "0.60"}, model="slip")
    wanted = rerating.Request(
        wrong.id, right.id, datetime(2028, 1, 1, tzinfo=UTC), datetime(2028, 2, 1, tzinfo=UTC)
    )
    with deployment.database.transaction() as session:
        (change,) = rerating.post_all(session, deployment.clock, wanted)
        assert change.difference == -units_of("16.2")
        assert rerating.post_all(session, deployment.clock, wanted) == []
    deployment.record(deployment.event(output_tokens=50_000_000, input_tokens=0, cached_tokens=0))
    (february,) = closed(deployment)
    assert february["total"]["text"] == "13.80"
    adjusted = next(line for line in february["lines"] if line["kind"] == "adjustment")
    assert "2028-01-01 to 2028-02-01" in adjusted["description"]


def test_a_refund_with_a_credit_note_leaves_nothing_open(deployment: Deployment) -> None:
    deployment.record(deployment.event(output_tokens=20_000_000, input_tokens=0, cached_tokens=0))
    (document,) = closed(deployment)
    payment_id = pay(deployment, document["id"], document["due"]["minor"], "card")
    now = deployment.clock.now()
    with deployment.database.transaction() as session:
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
        from billing.payments.tables import Payment

        payment = session.get_one(Payment, payment_id)
        settlement.refund(session, payment, 500, "outage", now)
        assert open_amounts.open_minor(invoices.get(session, document["id"])) == 0
        assert ledger.balance(session, "acme", AccountKind.CASH, "USD") == units_of("7")
    assert closed(deployment) == []


def test_a_prepaid_tenant_s_limit_follows_the_wallet(deployment: Deployment) -> None:
    with deployment.database.transaction() as session:
        ensure_account(session, "acme", deployment.clock.now()).prepaid_only = True
        credits.grant(
            session,
            tenant_id="acme",
            kind="prepaid",
            money=Money(units_of("10")),
            reference="first",
            at=deployment.clock.now(),
        )

    def _left() -> int:
        with deployment.database.read() as session:
            reader = budgets.LimitReader(session, deployment.clock.now(), UnratedUsage())
            (limit,) = reader.of_key("acme", "proj", "key")
            return limit.cap_units - limit.spent_units

    assert _left() == units_of("10")
    deployment.record(deployment.event(output_tokens=10_000_000, input_tokens=0, cached_tokens=0))
    deployment.rate()
    assert _left() == units_of("4")
    (document,) = closed(deployment)
    assert (document["due"]["minor"], document["status"]) == (0, "paid")
    assert document["prepaid"]["text"] == "6.00"
    deployment.clock.advance(timedelta(days=1).total_seconds())
    assert _left() == units_of("4")
