"""Dunning to the very moment: when a case opens, who is reminded when, and when service ends.

The invoice of each test is 12.00, final on February 10 and due on the 24th.
"""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

from billing import dunning, settlement, subscriptions
from billing.accounts import lock_account
from billing.dunning import DunningResult
from billing.models import BillingAccount, DunningCase, Invoice, OutboxMessage, Plan
from billing.payments.manual import ManualPayments
from core.tenants.models import Tenant
from tests.billing.conftest import Deployment
from tests.billing.test_settlement import Customer

DUE = datetime(2026, 2, 24, tzinfo=UTC)
INSTANT, DAY = timedelta(microseconds=1), timedelta(days=1)


@pytest.fixture
def customer(lite: Deployment) -> Customer:
    """On a plan that ends service ten days after the due day."""
    now = lite.clock.now()
    with lite.database.transaction() as session:
        plan = Plan(id="pro", name="pro", currency="USD", suspend_after_days=10, created_at=now)
        session.add(plan)
        session.flush()
        subscriptions.subscribe(session, "acme", "pro", now)
        lock_account(session, "acme").email = "money@acme.invalid"
    made = Customer(lite).invoiced()
    assert made.invoice.due_at == DUE
    return made


def run(customer: Customer, at: datetime) -> DunningResult:
    customer.deployment.clock.set(at)
    made = customer.deployment
    return dunning.run(made.database, made.clock, ManualPayments())


def standing(customer: Customer) -> tuple[str, str]:
    with customer.deployment.database.read() as session:
        return (
            session.get_one(Tenant, "acme").status,
            session.get_one(BillingAccount, "acme").status,
        )


def case(customer: Customer) -> DunningCase:
    with customer.deployment.database.read() as session:
        return session.scalars(select(DunningCase)).one()


def told(customer: Customer) -> list[str]:
    with customer.deployment.database.read() as session:
        found = session.scalars(select(OutboxMessage.payload).order_by(OutboxMessage.id))
        return [str(each["event"]) for each in found]


def test_a_case_opens_at_the_moment_that_the_invoice_is_due(customer: Customer) -> None:
    assert run(customer, DUE - INSTANT) == DunningResult()
    assert (standing(customer), told(customer)) == (("active", "active"), [])
    assert run(customer, DUE) == DunningResult(opened=1, reminded=1)
    assert standing(customer) == ("active", "past_due")
    with customer.deployment.database.read() as session:
        (message,) = session.scalars(select(OutboxMessage))
    assert message.subject == "Invoice TH-000001 is unpaid: 12.00 USD"
    assert message.payload == {
        "event": "invoice.reminder",
        "invoice": "TH-000001",
        "open": "12.00",
        "currency": "USD",
        "due": "2026-02-24",
        "service_ends": "2026-03-06",
        "pay_at": "",
    }


def test_each_reminder_is_sent_at_its_moment_and_once(customer: Customer) -> None:
    with customer.deployment.database.transaction() as session:
        session.get_one(Plan, "pro").suspend_after_days = None
    assert run(customer, DUE) == DunningResult(opened=1, reminded=1)
    for day in (3, 7, 14, 21):
        assert run(customer, DUE + day * DAY - INSTANT) == DunningResult()
        assert run(customer, DUE + day * DAY) == DunningResult(reminded=1)
        assert run(customer, DUE + day * DAY) == DunningResult()
    assert run(customer, DUE + 90 * DAY) == DunningResult()
    assert told(customer) == ["invoice.reminder"] * 5
    assert standing(customer) == ("active", "past_due")


def test_reminders_that_an_outage_missed_are_not_made_up_for(customer: Customer) -> None:
    with customer.deployment.database.transaction() as session:
        session.get_one(Plan, "pro").suspend_after_days = None
    run(customer, DUE)
    assert run(customer, DUE + 15 * DAY) == DunningResult(reminded=1)
    assert case(customer).next_at == DUE + 21 * DAY
    assert run(customer, DUE + 20 * DAY) == DunningResult()
    assert run(customer, DUE + 21 * DAY) == DunningResult(reminded=1)


def test_service_ends_at_the_moment_that_the_plan_names_and_returns_with_the_money(
    customer: Customer,
) -> None:
    run(customer, DUE)
    run(customer, DUE + 7 * DAY)
    assert run(customer, DUE + 10 * DAY - INSTANT) == DunningResult()
    assert standing(customer) == ("active", "past_due")
    assert run(customer, DUE + 10 * DAY) == DunningResult(suspended=1)
    assert standing(customer) == ("unpaid", "suspended")
    assert run(customer, DUE + 11 * DAY) == DunningResult()
    customer.pay(1200, "wire")
    assert run(customer, DUE + 12 * DAY) == DunningResult(closed=1)
    assert standing(customer) == ("active", "active")
    assert told(customer)[-2:] == ["invoice.suspended", "invoice.reinstated"]
    assert (case(customer).outcome, case(customer).closed_at) == ("paid", DUE + 12 * DAY)


def test_a_debit_in_process_holds_everything_for_three_weeks(customer: Customer) -> None:
    customer.deployment.clock.set(DUE)
    with customer.deployment.database.transaction() as session:
        settlement.begin_payment(
            session,
            tenant_id="acme",
            invoice_id=customer.invoice_id,
            amount_minor=1200,
            currency="USD",
            provider="manual",
            reference="debit",
            at=DUE,
        )
    assert run(customer, DUE + 21 * DAY - INSTANT) == DunningResult()
    assert run(customer, DUE + 21 * DAY) == DunningResult(opened=1, reminded=1, suspended=1)


@pytest.mark.parametrize(
    ("end", "outcome"), [("write_off", "written_off"), ("void", "voided"), ("pay", "paid")]
)
def test_a_case_says_how_it_ended(customer: Customer, end: str, outcome: str) -> None:
    run(customer, DUE)
    if end == "pay":
        customer.pay(1200, "wire")
    else:
        getattr(customer, end)()
    made = customer.deployment
    assert dunning.settle(made.database, made.clock, ["other"]) == 0
    assert dunning.settle(made.database, made.clock) == 1
    assert dunning.settle(made.database, made.clock) == 0
    assert (case(customer).outcome, case(customer).next_at) == (outcome, None)
    assert standing(customer) == ("active", "active")


def test_who_is_billed_by_stripe_itself_is_not_reminded_here(customer: Customer) -> None:
    with customer.deployment.database.transaction() as session:
        lock_account(session, "acme").collection = "stripe_meters"
    assert run(customer, DUE + DAY) == DunningResult()


@pytest.mark.parametrize(("credited", "opened"), [(1200, 0), (1199, 1)])
def test_a_case_opens_for_a_cent_and_not_for_nothing(
    customer: Customer, credited: int, opened: int
) -> None:
    with customer.deployment.database.transaction() as session:
        session.get_one(Invoice, customer.invoice_id).credited_minor = credited
    assert run(customer, DUE + DAY).opened == opened
