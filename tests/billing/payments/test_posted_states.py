"""States of a provider's objects, posted in any order: the rows that they leave, whole."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from billing.invoicing.tables import Invoice
from billing.payments import posting, settlement
from billing.payments.base import (
    DisputeState,
    InvoiceState,
    Method,
    PaymentState,
    RefundState,
    Status,
)
from billing.payments.posting import ForeignObject, UnknownObject
from billing.payments.tables import (
    Dispute,
    DunningCase,
    Payment,
    PaymentCommand,
    PaymentCustomer,
    PaymentMethod,
    Refund,
)
from tests.billing.conftest import START
from tests.billing.payments.provider_rows import invoice_row, payment_row

NOW, LATER = START + timedelta(days=3), START + timedelta(days=5)
PAID = PaymentState("pi_1", Status.SUCCEEDED, 400, "USD")
OURS = InvoiceState("in_9", "inv_01", "open", "USD", 1000, 600, (PAID,), page="https://pay.example")


def _payments(session: Session) -> list[tuple[Any, ...]]:
    rows = session.scalars(select(Payment).order_by(Payment.external_id))
    return [
        (p.external_id, p.invoice_id, p.amount_minor, p.status, p.failure, p.settled_at)
        for p in rows
    ]


def test_an_invoice_takes_its_name_its_page_and_its_payments(session: Session) -> None:
    invoice_row(session, 1, external_id=None)
    state = replace(OURS, payments=(PAID, replace(PAID, external_id="pi_2", amount_minor=100)))
    made = posting.invoice(session, "stripe", state, NOW)
    assert (made.id, made.external_id, made.pay_page) == ("inv_01", "in_9", "https://pay.example")
    assert made.paid_minor == 500
    posting.invoice(session, "stripe", replace(state, invoice_id="", page=""), LATER)
    assert made.pay_page == "https://pay.example" and made.paid_minor == 500
    assert _payments(session) == [
        ("pi_1", "inv_01", 400, "succeeded", None, NOW),
        ("pi_2", "inv_01", 100, "succeeded", None, NOW),
    ]
    first = session.scalars(select(Payment).where(Payment.external_id == "pi_1")).one()
    kept = (first.tenant_id, first.provider, first.reference, first.currency, first.created_at)
    assert kept == ("acme", "stripe", "stripe:pi_1", "USD", NOW)
    posting.invoice(session, "stripe", replace(state, external_id="in_other"), LATER)
    assert made.external_id == "in_9", "a second copy does not take its place"


def test_an_invoice_that_is_not_ours_or_not_here(session: Session) -> None:
    with pytest.raises(ForeignObject, match="invoice in_9"):
        posting.invoice(session, "stripe", replace(OURS, invoice_id=""), NOW)
    said = "in_9 names invoice inv_01, which does not exist here"
    with pytest.raises(UnknownObject, match=said):
        posting.invoice(session, "stripe", OURS, NOW)


def test_a_payment_fails_is_in_process_again_and_succeeds_for_good(session: Session) -> None:
    invoice_row(session, 1)
    failed = replace(PAID, status=Status.FAILED, failure="no funds")
    posting.invoice(session, "stripe", replace(OURS, payments=(failed,)), NOW)
    assert _payments(session) == [("pi_1", "inv_01", 400, "failed", "no funds", NOW)]
    waits = replace(PAID, status=Status.PENDING)
    posting.payment(session, "stripe", waits, LATER)
    assert _payments(session)[0][3:] == ("failed", "no funds", NOW), "it waits for another card"
    posting.payment(session, "stripe", replace(waits, in_process=True), LATER)
    assert _payments(session) == [("pi_1", "inv_01", 400, "pending", None, None)]
    posting.payment(session, "stripe", replace(failed, failure=""), LATER)
    assert _payments(session)[0][3:] == ("failed", "no reason given", LATER)
    posting.payment(session, "stripe", replace(PAID, amount_minor=350), LATER)
    done = [("pi_1", "inv_01", 350, "succeeded", None, LATER)]
    assert _payments(session) == done, "a credit note had lowered it"
    for state in (failed, replace(waits, in_process=True), replace(PAID, amount_minor=9)):
        posting.payment(session, "stripe", state, LATER + timedelta(days=1))
    assert _payments(session) == done
    assert session.get_one(Invoice, "inv_01").paid_minor == 350


def test_a_charge_is_found_by_our_id_and_takes_the_provider_s(session: Session) -> None:
    payment_row(session, "a", external_id=None, status="pending")
    payment_row(session, "b", provider="fake", external_id="pi_1", status="pending")
    with pytest.raises(ForeignObject, match="payment pi_1"):
        posting.payment(session, "stripe", PAID, NOW)
    with pytest.raises(UnknownObject, match="pi_1 names payment pay_x, which does not exist here"):
        posting.payment(session, "stripe", replace(PAID, payment_id="pay_x"), NOW)
    nameless = PaymentState("", Status.FAILED, 500, "USD", "no card", payment_id="pay_a")
    posting.payment(session, "stripe", nameless, NOW)
    made = session.get_one(Payment, "pay_a")
    assert (made.external_id, made.status, made.failure) == (None, "failed", "no card")
    posting.payment(session, "stripe", replace(PAID, payment_id="pay_a", amount_minor=500), NOW)
    assert (made.external_id, made.status, made.failure) == ("pi_1", "succeeded", None)
    posting.payment(session, "stripe", replace(PAID, external_id="pi_2", payment_id="pay_a"), NOW)
    assert made.external_id == "pi_1"
    assert settlement.wallet(session, "acme", "USD") == 500 * 10**10


def _paid(session: Session) -> Payment:
    payment_row(session, "a", external_id="pi_1", status="pending")
    posting.payment(session, "stripe", replace(PAID, amount_minor=500), NOW)
    return session.get_one(Payment, "pay_a")


BACK = RefundState("re_1", "pi_1", Status.SUCCEEDED, 200, "USD")


def _refunds(session: Session) -> list[tuple[Any, ...]]:
    rows = session.scalars(select(Refund).order_by(Refund.created_at, Refund.id))
    return [
        (r.external_id, r.reference, r.amount_minor, r.status, r.reason, r.created_at) for r in rows
    ]


def test_a_refund_that_was_made_at_the_provider(session: Session) -> None:
    payment_row(session, "w", external_id="pi_w", status="pending")
    for name in ("pi_1", "pi_w", ""):
        said = f"re_1 belongs to payment {name}, which has not succeeded here"
        with pytest.raises(UnknownObject, match=said):
            posting.refund(session, "stripe", replace(BACK, payment_external_id=name), NOW)
    paid = _paid(session)
    posting.refund(session, "stripe", replace(BACK, status=Status.FAILED), NOW)
    assert _refunds(session) == [], "one that failed before it was heard of"
    posting.refund(session, "stripe", replace(BACK, status=Status.PENDING), NOW)
    row = ("re_1", "stripe:re_1", 200, "pending", "created at the provider", NOW)
    assert (_refunds(session), paid.refunded_minor) == ([row], 200)
    assert settlement.wallet(session, "acme", "USD") == 300 * 10**10
    posting.refund(session, "stripe", BACK, LATER)
    assert _refunds(session) == [(*row[:3], "succeeded", *row[4:])]
    posting.refund(session, "stripe", replace(BACK, status=Status.FAILED), LATER)
    why = "created at the provider (no reason given)"
    assert _refunds(session) == [(*row[:3], "failed", why, NOW)]
    posting.refund(session, "stripe", BACK, LATER)
    assert (_refunds(session)[0][3], paid.refunded_minor) == ("failed", 0), "it stays failed"


def test_a_refund_of_ours_is_found_by_its_reference(session: Session) -> None:
    paid = _paid(session)
    made = settlement.refund(session, paid, 200, "goodwill", NOW, reason="kind", status="pending")
    state = replace(BACK, reference="goodwill", external_id="")
    posting.refund(session, "stripe", replace(state, status=Status.PENDING), LATER)
    assert made.external_id is None
    posting.refund(session, "stripe", replace(state, external_id="re_7"), LATER)
    assert (made.external_id, made.status) == ("re_7", "succeeded")
    failed = replace(state, external_id="re_8", status=Status.FAILED, failure="closed")
    posting.refund(session, "stripe", failed, LATER)
    assert (made.external_id, made.status, made.reason) == ("re_7", "failed", "kind (closed)")
    other = replace(BACK, external_id="re_9", reference="unknown to us")
    posting.refund(session, "stripe", other, LATER)
    assert [each[0] for each in _refunds(session)] == ["re_7", "re_9"]


OPEN = DisputeState("dp_1", "pi_1", "open", 300, "USD", True, START)


def test_a_dispute_withdraws_and_returns_the_money_once(session: Session) -> None:
    with pytest.raises(
        UnknownObject, match="dp_1 belongs to payment pi_1, which has not succeeded"
    ):
        posting.dispute(session, "stripe", OPEN, NOW)
    _paid(session)

    def _row() -> tuple[Any, ...]:
        found = session.scalars(select(Dispute)).one()
        return (found.status, found.withdrawn, found.opened_at, found.closed_at)

    def _wallet() -> int:
        return settlement.wallet(session, "acme", "USD") // 10**10

    warned = replace(OPEN, withdrawn=False, status="warning", at=None)
    posting.dispute(session, "stripe", warned, NOW)
    assert (_row(), _wallet()) == (("warning", False, NOW, NOW), 500)
    for _ in range(2):
        posting.dispute(session, "stripe", OPEN, LATER)
        assert (_row(), _wallet()) == (("open", True, NOW, NOW), 200)
    for _ in range(2):
        posting.dispute(session, "stripe", replace(OPEN, status="won", withdrawn=False), LATER)
        assert (_row(), _wallet()) == (("won", False, NOW, NOW), 500)
    found = session.scalars(select(Dispute)).one()
    assert (found.payment_id, found.tenant_id, found.provider) == ("pay_a", "acme", "stripe")
    assert (found.external_id, found.currency, found.amount_minor) == ("dp_1", "USD", 300)


def test_when_a_dispute_was_opened_and_closed(session: Session) -> None:
    _paid(session)
    posting.dispute(session, "stripe", OPEN, NOW)
    found = session.scalars(select(Dispute)).one()
    assert (found.opened_at, found.closed_at) == (START, None)
    posting.dispute(session, "stripe", replace(OPEN, status="lost"), LATER)
    posting.dispute(session, "stripe", replace(OPEN, status="lost"), LATER + timedelta(days=1))
    assert (found.status, found.closed_at, found.withdrawn) == ("lost", LATER, True)


def _customer(session: Session) -> PaymentCustomer:
    made = PaymentCustomer(
        tenant_id="acme", provider="stripe", external_id="cus_1", created_at=START
    )
    session.add(made)
    session.flush()
    return made


def _methods(session: Session) -> list[tuple[Any, ...]]:
    rows = session.scalars(select(PaymentMethod).order_by(PaymentMethod.external_id))
    return [(m.external_id, m.label, m.created_at, m.detached_at) for m in rows]


VISA, BANK = Method("pm_1", "Visa 4242", True), Method("pm_2", "Bank 3000", False)


def test_methods_of_a_customer_come_and_go(session: Session) -> None:
    with pytest.raises(ForeignObject, match="customer cus_1"):
        posting.customer(session, "stripe", "cus_1", [VISA], NOW)
    made, account = _customer(session), session.get_one(BillingAccount, "acme")
    with pytest.raises(ForeignObject):
        posting.customer(session, "fake", "cus_1", [VISA], NOW)
    posting.customer(session, "stripe", "cus_1", [], NOW)
    assert (account.collection, made.default_method, _methods(session)) == ("manual", None, [])
    posting.customer(session, "stripe", "cus_1", [VISA, BANK], NOW)
    assert (account.collection, made.default_method) == ("stripe", "pm_1")
    first, second = ("pm_1", "Visa 4242", NOW, None), ("pm_2", "Bank 3000", NOW, None)
    assert _methods(session) == [first, second]
    renamed = replace(BANK, label="Bank 3001", is_default=True)
    posting.customer(session, "stripe", "cus_1", [renamed], LATER)
    posting.customer(session, "stripe", "cus_1", [renamed], LATER + timedelta(days=1))
    assert _methods(session) == [(*first[:3], LATER), ("pm_2", "Bank 3001", NOW, None)]
    assert made.default_method == "pm_2"
    account.collection = "stripe_meters"
    posting.customer(session, "stripe", "cus_1", [VISA], LATER)
    assert account.collection == "stripe_meters"
    assert _methods(session)[0] == first, "it is attached again"
    posting.customer(session, "stripe", "cus_1", [], LATER)
    assert made.default_method is None


def test_a_new_default_method_retries_the_overdue_invoices_once(session: Session) -> None:
    _customer(session)
    for number, fields, closed in (
        (1, {}, None),
        (2, {"external_id": None}, None),
        (3, {}, NOW),
        (4, {}, None),
    ):
        invoice_row(session, number, sent=False, **fields)
        tenant = "birch" if number == 4 else "acme"
        case = DunningCase(
            invoice_id=f"inv_{number:02}", tenant_id=tenant, opened_at=NOW, closed_at=closed
        )
        session.add(case)
    session.flush()

    def _queued() -> list[str]:
        rows = select(PaymentCommand.idempotency_key).order_by(PaymentCommand.id)
        return list(session.scalars(rows))

    posting.customer(session, "stripe", "cus_1", [replace(VISA, is_default=False)], NOW)
    assert _queued() == []
    for _ in range(2):
        posting.customer(session, "stripe", "cus_1", [VISA], NOW)
        assert _queued() == ["collect:inv_01:pm_1"]
    posting.customer(session, "stripe", "cus_1", [replace(BANK, is_default=True)], LATER)
    assert _queued() == ["collect:inv_01:pm_1", "collect:inv_01:pm_2"]
    made = session.scalars(select(PaymentCommand)).first()
    assert made is not None
    assert (made.provider, made.tenant_id, made.kind, made.subject_id) == (
        "stripe",
        "acme",
        "collect",
        "inv_01",
    )
    assert (made.created_at, made.next_at, made.attempts, made.failed) == (NOW, NOW, 0, False)
