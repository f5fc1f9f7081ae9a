"""Dunning to the very moment: when a case opens, who is reminded when, and when service ends.

The invoice of each test is 12.00, final on February 10 and due on the 24th.
"""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_account
from billing.accounts.tables import BillingAccount
from billing.invoicing import invoice_run
from billing.invoicing.tables import Invoice
from billing.notices import webhooks
from billing.notices.tables import OutboxMessage
from billing.payments import commands, dunning, settlement
from billing.payments.dunning import DunningResult
from billing.payments.manual import ManualPayments
from billing.payments.tables import DunningCase, Payment, PaymentCommand
from billing.subscriptions import subscriptions
from billing.subscriptions.tables import Plan
from core.tenants.models import Tenant
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import Deployment
from tests.billing.payments.test_settlement import Customer

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
    customer.pay(1199, "all but a cent")
    assert run(customer, DUE + 11 * DAY) == DunningResult()
    customer.pay(1, "wire")
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


@pytest.mark.parametrize(("metered", "opened"), [(True, 0), (False, 1)])
def test_an_invoice_over_usage_that_stripe_bills_is_not_reminded_of(
    customer: Customer, metered: bool, opened: int
) -> None:
    """Whatever the account's way of collection is by then."""
    with customer.deployment.database.transaction() as session:
        session.get_one(Invoice, customer.invoice.id).metered = metered
    assert run(customer, DUE + DAY).opened == opened


@pytest.mark.parametrize(("credited", "opened"), [(1200, 0), (1199, 1)])
def test_a_case_opens_for_a_cent_and_not_for_nothing(
    customer: Customer, credited: int, opened: int
) -> None:
    with customer.deployment.database.transaction() as session:
        session.get_one(Invoice, customer.invoice_id).credited_minor = credited
    assert run(customer, DUE + DAY).opened == opened


class Collecting(ManualPayments):
    """Collects what is billed by hand, so that no server is needed."""

    collects = True


@pytest.mark.parametrize(
    ("provider", "collection", "retries", "turns"),
    [
        (Collecting(), "manual", True, ["20260224.1", "20260224.2"]),
        (Collecting(), "manual", False, []),
        (Collecting(), "stripe", True, []),
        (ManualPayments(), "manual", True, []),
    ],
)
def test_a_card_is_tried_again_with_each_reminder_but_the_first(
    customer: Customer, provider: ManualPayments, collection: str, retries: bool, turns: list[str]
) -> None:
    made = customer.deployment
    with made.database.transaction() as session:
        lock_account(session, "acme").collection = collection
        session.get_one(Plan, "pro").suspend_after_days = None
        ask(session, customer, done=True)
    for days in (0, 3, 7):
        made.clock.set(DUE + days * DAY)
        found = dunning.run(made.database, made.clock, provider, retries=retries)
        assert found.reminded == 1
    with made.database.read() as session:
        keys = session.scalars(
            select(PaymentCommand.idempotency_key).where(PaymentCommand.kind == "collect")
        )
        asked = [key for key in keys if "." in key]
    assert asked == [f"collect:{customer.invoice_id}:{turn}" for turn in turns]


def ask(session: Session, customer: Customer, *, done: bool = False, failed: bool = False) -> None:
    """The first collection by the provider, as it is planned, done or rejected."""
    command = commands.row(
        "manual",
        "acme",
        kind=commands.COLLECT,
        subject_id=customer.invoice_id,
        key=commands.first_collection(customer.invoice_id),
        at=DUE,
    )
    commands.put(session, command | {"done_at": DUE if done else None, "failed": failed})


@pytest.mark.parametrize(
    ("planned", "done", "failed", "reminded"),
    [
        (False, False, False, 0),
        (True, False, False, 0),
        (True, True, False, 1),
        (True, False, True, 1),
    ],
)
def test_nobody_is_reminded_of_an_invoice_that_the_provider_is_still_to_be_asked_for(
    customer: Customer, planned: bool, done: bool, failed: bool, reminded: int
) -> None:
    made = customer.deployment
    if planned:
        with made.database.transaction() as session:
            ask(session, customer, done=done, failed=failed)
    made.clock.set(DUE + 20 * DAY)
    found = dunning.run(made.database, made.clock, Collecting())
    assert (found.reminded, found.suspended) == (reminded, reminded)


def test_a_declined_card_opens_a_case_before_the_due_day(customer: Customer) -> None:
    made = customer.deployment
    with made.database.transaction() as session:
        begun = begin(session, customer, "card")
        settlement.fail(session, begun, "declined", made.clock.now())
    assert run(customer, DUE - 9 * DAY) == DunningResult(opened=1, reminded=1)
    assert case(customer).opened_at == DUE - 9 * DAY
    assert standing(customer) == ("active", "past_due")


def begin(session: Session, customer: Customer, name: str) -> Payment:
    return settlement.begin_payment(
        session,
        tenant_id="acme",
        invoice_id=customer.invoice_id,
        amount_minor=1200,
        currency="USD",
        provider="manual",
        reference=name,
        at=customer.deployment.clock.now(),
    )


def test_a_debit_that_begins_holds_a_case_that_is_open(customer: Customer) -> None:
    run(customer, DUE)
    with customer.deployment.database.transaction() as session:
        begun = begin(session, customer, "debit").id
    assert run(customer, DUE + 11 * DAY) == DunningResult()
    assert standing(customer) == ("active", "past_due")
    with customer.deployment.database.transaction() as session:
        settlement.fail(session, session.get_one(Payment, begun), "no funds", DUE + 11 * DAY)
    assert run(customer, DUE + 11 * DAY) == DunningResult(reminded=1, suspended=1)


def test_a_paid_case_opens_again_as_a_new_one_if_the_money_leaves(customer: Customer) -> None:
    run(customer, DUE)
    run(customer, DUE + 10 * DAY)
    assert standing(customer) == ("unpaid", "suspended")
    payment = customer.pay(1200, "wire")
    assert run(customer, DUE + 12 * DAY) == DunningResult(closed=1)
    customer.refund(payment, 1200)
    assert run(customer, DUE + 13 * DAY) == DunningResult(opened=1, reminded=1, suspended=1)
    found = case(customer)
    assert (found.step, found.closed_at, found.outcome) == (1, None, None)
    assert (found.opened_at, found.suspended_at) == (DUE + 13 * DAY, DUE + 13 * DAY)
    assert found.next_at == DUE + 16 * DAY
    assert told(customer).count("invoice.suspended") == 2
    assert told(customer).count("invoice.reinstated") == 1


def test_service_returns_when_the_last_unpaid_invoice_is_paid(customer: Customer) -> None:
    """A second invoice of 6.00, due a month later; the first alone ended service."""
    made, first = customer.deployment, customer.invoice_id
    customer.use(10_000_000)
    made.clock.set(datetime(2026, 3, 3, tzinfo=UTC))
    (second,) = invoice_run.run(made.database, made.clock, current=False).finalised
    run(customer, DUE + 10 * DAY)
    assert standing(customer) == ("unpaid", "suspended")
    at = datetime(2026, 4, 5, tzinfo=UTC)
    assert run(customer, at) == DunningResult(opened=1, reminded=2, suspended=1)
    customer.pay(1200, "first")
    assert run(customer, at + DAY) == DunningResult(closed=1)
    assert standing(customer) == ("unpaid", "suspended"), "the other one is unpaid as well"
    with made.database.transaction() as session:
        session.get_one(DunningCase, second).suspended_at = None
        session.get_one(DunningCase, first).closed_at = None
    assert dunning.settle(made.database, made.clock, ["acme"]) == 1
    assert standing(customer) == ("active", "past_due")
    assert told(customer)[-1] == "invoice.reinstated"
    customer.invoice_id = second
    customer.pay(600, "second")
    assert run(customer, at + 2 * DAY) == DunningResult(closed=1)
    assert standing(customer) == ("active", "active")
    assert told(customer).count("invoice.reinstated") == 1, "service was not ended any more"


def test_mail_and_webhooks_are_told_where_to_pay_until_the_invoice_is_settled(
    customer: Customer,
) -> None:
    made, url = customer.deployment, "https://hooks.example.com/dunning"
    with made.database.transaction() as session:
        webhooks.add(session, scope_of_operator("acme"), made.clock, url)
        session.get_one(Invoice, customer.invoice_id).pay_page = "https://pay.example.com/1"
    run(customer, DUE)
    run(customer, DUE + 10 * DAY)
    customer.pay(1200, "wire")
    run(customer, DUE + 12 * DAY)
    with made.database.read() as session:
        rows = session.scalars(select(OutboxMessage).order_by(OutboxMessage.id)).all()
    dunned = [each for each in rows if each.payload["event"] != "payment.succeeded"]
    expected = [
        ("invoice.reminder", "12.00", "https://pay.example.com/1", "2026-03-06"),
        ("invoice.reminder", "12.00", "https://pay.example.com/1", "2026-03-06"),
        ("invoice.suspended", "12.00", "https://pay.example.com/1", "2026-03-06"),
        ("invoice.reinstated", "0.00", "", ""),
    ]
    names = ("event", "open", "pay_at", "service_ends")
    for target in (url, "money@acme.invalid"):
        found = [each.payload for each in dunned if each.target == target]
        assert [tuple(each[name] for name in names) for each in found] == expected
    assert [each.subject for each in dunned if each.target == url][2:] == [
        "Service is suspended: invoice TH-000001 is unpaid",
        "Service is restored: invoice TH-000001 is settled",
    ]


def test_who_has_no_address_and_no_plan_is_a_case_all_the_same(lite: Deployment) -> None:
    made = Customer(lite).invoiced()
    assert run(made, DUE) == DunningResult(opened=1, reminded=1)
    assert run(made, DUE + 90 * DAY) == DunningResult(reminded=1)
    assert run(made, DUE + 91 * DAY) == DunningResult()
    assert (standing(made), told(made)) == (("active", "past_due"), [])
    with lite.database.read() as session:
        assert dunning.suspend_at(session, made.invoice, DUE) is None


def test_the_end_of_service_is_that_of_the_plan_in_force(customer: Customer) -> None:
    with customer.deployment.database.transaction() as session:
        invoice = session.get_one(Invoice, customer.invoice_id)
        assert dunning.suspend_at(session, invoice, DUE) == DUE + 10 * DAY
        before = datetime(2025, 12, 1, tzinfo=UTC)
        assert dunning.suspend_at(session, invoice, before) is None
        invoice.due_at = None
        assert dunning.suspend_at(session, invoice, DUE) is None
        session.rollback()
