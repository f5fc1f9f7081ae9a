"""Ledger against Stripe: nothing is listed where both agree, and each kind of difference is."""

import copy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update

from billing.audit import reconcile
from billing.invoicing import credit_notes, open_amounts
from billing.invoicing.tables import Invoice
from billing.payments import commands, compare, settlement
from billing.payments.base import PaymentProvider, Window
from billing.payments.fake_stripe import customers, invoices, payments
from billing.payments.fake_stripe.faults import Fault
from billing.payments.fake_stripe.state import StripeState
from billing.payments.provider_snapshot import ALL_TIME, fetch
from billing.payments.tables import Payment, PaymentCommand, Refund
from billing.pricing.pricing import PriceVersion
from billing.tasks import audit
from core.clock import FakeClock
from core.database import Database
from core.queue import TaskContext
from core.settings import Settings
from tests.billing.conftest import Deployment, deployment_of
from tests.billing.payments.stripe_deployment import Till, open_till


def _listed(till: Till, window: Window | None = ALL_TIME) -> list[str]:
    theirs = fetch(till.deployment.database, till.provider, till.deployment.clock.now(), window)
    with till.deployment.database.read() as session:
        report = reconcile.audit(
            session, more=(lambda s: compare.differences(s, theirs),), steps=theirs.steps()
        )
    assert report.steps["stripe invoices"]["count"] == len(theirs.invoices)
    return [f"{each.check}: {each.kind}: {each.message}" for each in report.differences]


def _live(till: Till) -> str:
    """Invoices paid, open, lowered, void and written off; a top-up; refunds; a dispute won. Gives the
    id of the paid one.
    """
    till.leave_card()
    till.settle()
    paid = till.invoice(12)
    till.settle()
    (payment,) = till.payments()
    assert payment.external_id is not None
    with till.deployment.database.transaction() as session:
        now = till.deployment.clock.now()
        commands.request_refund(session, payment.id, 200, "goodwill", now)
    won = payments.open_dispute(till.stripe.books, payment.external_id, 300)
    payments.close_dispute(till.stripe.books, won["id"], "won")
    till.settle()
    till.leave_card("0341")
    till.settle()
    lowered, void, lost = (till.invoice(amount) for amount in (6, 3, 9))
    till.settle()
    with till.deployment.database.transaction() as session:
        now = till.deployment.clock.now()
        credit_notes.issue(
            session, invoice_id=lowered.id, net_minor=100, reason="x", reference="x", at=now
        )
        settlement.void(session, void.id, now, "wrong")
        settlement.write_off(session, lost.id, now)
    till.settle()
    return paid.id


@dataclass(frozen=True)
class Story:
    """Both sides' books after a life, to be copied: living it takes a hundred calls over HTTP."""

    file: Path
    books: StripeState
    version: PriceVersion
    paid: str


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, migrated_sqlite: Path) -> Story:
    file = tmp_path_factory.mktemp("lived") / "tollhouse.db"
    shutil.copy(migrated_sqlite, file)
    database = Database(f"sqlite:///{file}")
    deployment = deployment_of(database, FakeClock())
    with open_till(deployment) as till:
        paid = _live(till)
    database.close()
    return Story(file, till.stripe.books, deployment.version, paid)


@pytest.fixture
def lived(story: Story, tmp_path: Path) -> Iterator[Till]:
    """On SQLite, with a life behind it."""
    shutil.copy(story.file, tmp_path / "tollhouse.db")
    database = Database(f"sqlite:///{tmp_path / 'tollhouse.db'}")
    books, clock = copy.deepcopy(story.books), FakeClock(story.books.clock.now())
    with open_till(Deployment(database, clock, story.version), books) as made:
        yield made
    database.close()


def test_nothing_is_listed_where_both_agree(both: Till) -> None:
    _live(both)
    assert _listed(both) == []


def test_what_is_on_its_way_is_no_difference(till: Till) -> None:
    till.leave_card()
    till.settle()
    till.invoice(12)
    till.stripe.faults.plan("POST /v1/invoices.*pay", Fault.TIMEOUT_AFTER)
    till.push()
    till.push()
    assert till.waiting() == 1 and till.stripe.books.all("invoice")[0]["status"] == "paid"
    assert _listed(till) == []


def test_an_invoice_that_became_void_as_its_card_was_charged_is_credit_and_no_difference(
    till: Till,
) -> None:
    till.collect_by_stripe()
    invoice = till.invoice(12)
    till.settle()
    name = till.read(invoice.id).external_id
    assert name is not None
    till.leave_card()
    books = till.stripe.books  # where it is paid, and nobody here has heard of it
    (open_payment,) = books.all("invoice_payment", invoice=name, status="open")
    intent = books.get("payment_intent", open_payment["payment"]["payment_intent"])
    assert payments.attempt(books, intent, books.all("payment_method")[0]) is None
    invoices.paid_by(books, books.get("invoice", name), open_payment, intent)
    with till.deployment.database.transaction() as session:
        settlement.void(session, invoice.id, till.deployment.clock.now(), "wrong")
    till.settle()
    assert till.read(invoice.id).status == "void"
    (payment,) = till.payments()
    assert (payment.status, payment.amount_minor) == ("succeeded", 1200)
    with till.deployment.database.read() as session:
        assert settlement.wallet(session, "acme", "USD") == 1200 * 10**10
    assert _listed(till) == []


def _theirs_gone(books: StripeState, kind: str) -> None:
    del books.objects[kind][books.all(kind)[-1]["id"]]


def _theirs_dearer(books: StripeState) -> None:
    books.all("invoice")[-1]["total"] += 1


def _theirs_reopened(books: StripeState) -> None:
    books.all("invoice")[-1] |= {"status": "open", "amount_remaining": 5}


def _theirs_doubled(books: StripeState) -> None:
    first = books.all("invoice")[-1]
    customer = {"customer": first["customer"], "metadata": dict(first["metadata"])}
    invoices.create(books, customer)


def _theirs_unknown(books: StripeState) -> None:
    customer = books.all("customer")[0]["id"]
    invoices.create(books, {"customer": customer, "metadata": {"tollhouse_invoice": "inv_gone"}})


def _theirs_charged(books: StripeState) -> None:
    books.declines.clear()
    customer = books.all("customer")[0]["id"]
    customers.update_customer(
        books, customer, {"invoice_settings": {"default_payment_method": _card(books)}}
    )
    form = {"amount": "700", "currency": "usd", "customer": customer, "confirm": "true"}
    payments.create_intent(books, form | {"metadata": {"tollhouse_payment": "pay_gone"}})


def _card(books: StripeState) -> str:
    return str(books.all("payment_method")[0]["id"])


def _theirs_refunded(books: StripeState) -> None:
    paid = books.all("payment_intent", status="succeeded")[0]["id"]
    payments.create_refund(books, {"payment_intent": paid, "amount": "50"})


def _theirs_disputed(books: StripeState) -> None:
    paid = books.all("payment_intent", status="succeeded")[0]["id"]
    payments.open_dispute(books, paid, 100)


def _theirs_refund_failed(books: StripeState) -> None:
    payments.fail_refund(books, books.all("refund")[0]["id"])


def _theirs_smaller(books: StripeState) -> None:
    for each in books.all("invoice_payment", status="paid"):
        each["amount_paid"] -= 1
    for each in books.all("payment_intent", status="succeeded"):
        each["amount_received"] -= 1


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda b: _theirs_gone(b, "invoice"), "invoices/stripe: lost: stripe has no in_"),
        (_theirs_dearer, "invoices/stripe: amount: invoice TH-000001 is over 1200 USD here, 1201"),
        (_theirs_reopened, "invoices/stripe: amount: invoice TH-000001 is paid with 0 open here"),
        (_theirs_doubled, "invoices/stripe: duplicated: invoice inv_"),
        (_theirs_unknown, "names invoice inv_gone, which has another external id"),
        (_theirs_charged, "of 700 USD is not in the ledger"),
        (_theirs_smaller, "payments/stripe: amount: payment pi_"),
        (_theirs_refunded, "refunds/stripe: lost: refund re_"),
        (lambda b: _theirs_gone(b, "refund"), "refunds/stripe: lost: refund goodwill is posted"),
        (_theirs_refund_failed, "is succeeded here, failed at the provider"),
        (_theirs_disputed, "disputes/stripe: lost: dispute dp_"),
        (lambda b: _theirs_gone(b, "dispute"), "disputes/stripe: lost: dispute dp_"),
    ],
)
def test_each_kind_of_difference_at_stripe_is_listed(
    lived: Till, harm: Callable[[StripeState], Any], said: str
) -> None:
    harm(lived.stripe.books)
    listed = _listed(lived)
    assert any(said in each for each in listed), listed


def _ours(till: Till, statement: Any) -> None:
    with till.deployment.database.transaction() as session:
        session.execute(statement)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (update(Payment).values(amount_minor=1201), "stripe/ledger: amount: the ledger has"),
        (update(Payment).values(status="failed"), "of 1200 USD is not in the ledger"),
        (
            update(Payment).where(Payment.status == "succeeded").values(external_id="pi_other"),
            "of 1200 is posted but missing as pi_other there",
        ),
        (update(Refund).values(amount_minor=199), "refunds/stripe: amount"),
        (
            update(Invoice).where(Invoice.number == 1).values(external_id="in_other"),
            "stripe has no in_other for invoice TH-000001",
        ),
        (
            update(PaymentCommand)
            .where(PaymentCommand.kind == "lower")
            .values(failed=True, done_at=None, last_error="no"),
            "outbox/stripe: lost: command lower was rejected: no",
        ),
        (text("delete from disputes"), "disputes/stripe: lost: dispute dp_"),
        (text("delete from payment_outbox where kind = 'invoice'"), "was not sent to stripe"),
    ],
)
def test_each_kind_of_difference_in_our_books_is_listed(lived: Till, harm: Any, said: str) -> None:
    _ours(lived, harm)
    listed = _listed(lived)
    assert any(said in each for each in listed), listed


def test_the_scheduled_audit_makes_up_for_lost_events_and_lists_the_rest(
    story: Story, lived: Till
) -> None:
    books = lived.stripe.books
    _theirs_refunded(books)
    _theirs_unknown(books)
    lived.told = len(books.events)  # every one of these events is lost
    assert len(_listed(lived)) == 2
    services: dict[type, object] = {PaymentProvider: lived.provider}
    context = TaskContext(Settings(), lived.deployment.database, lived.deployment.clock, services)
    assert audit(context) is False
    (left,) = _listed(lived)
    assert "inv_gone" in left
    assert open_amounts.open_minor(lived.read(story.paid)) == 250
    lived.stripe.faults.rate = 1.0
    assert audit(context) is True, "without an answer the rest is audited"


def test_a_window_leaves_out_what_is_settled_and_old_and_finds_what_is_open(lived: Till) -> None:
    lived.deployment.clock.advance(days=100)
    refunds = lived.stripe.books.objects["refund"]
    refunds.clear()
    assert any("refund goodwill is posted" in each for each in _listed(lived))
    assert _listed(lived, None) == [], "settled, and older than the last days"
    owed = [
        each for each in lived.stripe.books.objects["invoice"].values() if each["status"] == "open"
    ]
    assert owed
    for each in owed:
        each["status"], each["amount_remaining"] = "void", 0
    assert any("open at the provider" in each for each in _listed(lived, None)), (
        "old, but still open here"
    )
