"""Payments, refunds, disputes and cash against a provider's records that are written here: every
difference, whole, and nothing else. What the provider's own fake tells is in `test_compare`."""

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from billing.differences import Difference
from billing.ledger.ledger import AccountKind, Transaction, post, transfer
from billing.payments import settlement
from billing.payments.base import DisputeState, PaymentState, RefundState, Status
from billing.payments.compare import ProviderDifference
from billing.payments.provider_snapshot import ProviderSnapshot
from core.money import Money
from tests.billing.conftest import START
from tests.billing.payments.provider_rows import (
    CENT,
    command_row,
    dispute_row,
    event_row,
    found,
    invoice_row,
    lost,
    off,
    payment_row,
    put_invoice,
    refund_row,
)


@pytest.fixture
def snapshot() -> ProviderSnapshot:
    return ProviderSnapshot("stripe", START)


def test_payments(session: Session, snapshot: ProviderSnapshot) -> None:
    check = "payments/stripe"

    def _paid(name: str, **fields: Any) -> PaymentState:
        plain = PaymentState(f"pi_{name}", Status.SUCCEEDED, 500, "USD")
        made = replace(plain, **fields)
        snapshot.payments[made.external_id] = made
        return made

    for name in "abcdefg":
        payment_row(session, name)
    payment_row(session, "h", status="pending")
    payment_row(session, "i", provider="manual")
    payment_row(session, "j", external_id=None)
    snapshot.expected_ids = {"pi_d", "pi_e", "pi_f", "pay_j"}  # not pi_g
    command_row(session, "pay_e", "charge", done_at=None)
    event_row(session, "pi_f")
    _paid("a")
    _paid("b", amount_minor=498)
    _paid("c", currency="EUR")
    charged = _paid("h", payment_id="pay_h")
    again = _paid("h2", payment_id="pay_h")
    unknown = _paid("x", amount_minor=77)
    _paid("y", status=Status.PENDING)
    _paid("z", status=Status.FAILED)
    event_row(session, "pi_w")
    _paid("w")
    event_row(session, "pay_v")
    _paid("v", payment_id="pay_v")
    for name in ("of_1", "of_2", "of_3"):
        part = PaymentState(f"pi_{name}", Status.SUCCEEDED, 1000, "USD")
        number = int(name[-1])
        put_invoice(snapshot, number, payments=(part,), status="paid", remaining_minor=0)
    command_row(session, "inv_02", "lower", done_at=None)
    event_row(session, "in_03")
    names = ("pi_h", "pi_h2")
    message = "payment pay_h was charged 2 times"
    assert found(session, snapshot, check) == [
        lost(check, "pay_j", "payment pay_j of 500 is posted but missing as pay_j there"),
        off(check, "pi_b", -2, "payment pi_b is over 500 USD here, 498 USD at the provider"),
        off(check, "pi_c", 0, "payment pi_c is over 500 USD here, 500 EUR at the provider"),
        lost(check, "pi_d", "payment pay_d of 500 is posted but missing as pi_d there"),
        lost(check, "pi_h", "payment pi_h of 500 USD is not in the ledger", charged),
        ProviderDifference(Difference(check, "duplicated", message, 1, 0, names)),
        lost(check, "pi_h2", "payment pi_h2 of 500 USD is not in the ledger", again),
        lost(
            check,
            "pi_of_1",
            "payment pi_of_1 of 1000 USD is not in the ledger",
            snapshot.invoices["in_01"],
        ),
        lost(check, "pi_x", "payment pi_x of 77 USD is not in the ledger", unknown),
    ]
    snapshot.payments["pi_a"] = replace(snapshot.payments["pi_a"], status=Status.FAILED)
    failed = lost(check, "pi_a", "payment pay_a of 500 is posted but missing as pi_a there")
    assert failed in found(session, snapshot, check)


def test_refunds(session: Session, snapshot: ProviderSnapshot) -> None:
    check = "refunds/stripe"

    def _back(name: str, **fields: Any) -> RefundState:
        plain = RefundState(
            f"re_{name}", "pi_a", Status.SUCCEEDED, 200, "USD", reference=f"back {name}"
        )
        made = replace(plain, **fields)
        snapshot.refunds[made.external_id] = made
        return made

    for name in "abcdefghi":
        refund_row(session, name)
    refund_row(session, "j", status="failed")
    refund_row(session, "k", status="failed")
    refund_row(session, "l", status="failed")
    refund_row(session, "m", external_id=None)
    refund_row(session, "n", provider="fake")
    snapshot.expected_ids = {"re_e", "re_f", "re_g", "re_l", "ref_m"}  # not re_i
    for name in ("f", "h", "o"):
        command_row(session, f"ref_{name}", "refund", done_at=None)
    event_row(session, "re_g")
    refund_row(session, "o", external_id=None)
    _back("a")
    _back("b", amount_minor=203)
    failed = _back("c", status=Status.FAILED)
    _back("d", status=Status.PENDING)
    _back("h", amount_minor=1)
    paid = _back("j")
    _back("k", status=Status.FAILED, amount_minor=9)
    foreign = _back("n")
    _back("o")  # found by its reference
    unknown = _back("x", amount_minor=50)
    _back("y", status=Status.FAILED)
    event_row(session, "re_z")
    _back("z")
    assert found(session, snapshot, check) == [
        off(check, "re_b", 3, "refund re_b is over 200 here, 203 at the provider"),
        off(check, "re_c", 200, "refund re_c is succeeded here, failed at the provider", failed),
        lost(check, "re_e", "refund back e is posted but missing at the provider"),
        off(check, "re_j", 200, "refund re_j is failed here, succeeded at the provider", paid),
        off(check, "re_k", -191, "refund re_k is over 200 here, 9 at the provider"),
        lost(check, "re_n", "refund re_n of 200 is not posted", foreign),
        lost(check, "re_x", "refund re_x of 50 is not posted", unknown),
        lost(check, "ref_m", "refund back m is posted but missing at the provider"),
    ]


def test_disputes(session: Session, snapshot: ProviderSnapshot) -> None:
    check = "disputes/stripe"

    def _open(name: str, **fields: Any) -> DisputeState:
        made = replace(DisputeState(f"dp_{name}", "pi_a", "open", 300, "USD", True), **fields)
        snapshot.disputes[made.external_id] = made
        return made

    for name in "abcdef":
        dispute_row(session, name)
    dispute_row(session, "g", provider="fake")
    snapshot.expected_ids = {"dp_d", "dp_e"}  # not dp_f
    event_row(session, "dp_e")
    _open("a", status="lost")  # as long as the money lies alike
    won = _open("b", status="won", withdrawn=False)
    dearer = _open("c", amount_minor=301)
    foreign = _open("g")
    unknown = _open("x", amount_minor=40)
    event_row(session, "dp_y")
    _open("y")
    assert found(session, snapshot, check) == [
        off(check, "dp_b", 300, "dispute dp_b is open here, won at the provider", won),
        off(check, "dp_c", 301, "dispute dp_c is open here, open at the provider", dearer),
        lost(check, "dp_d", "dispute dp_d is posted but missing at the provider"),
        lost(check, "dp_g", "dispute dp_g of 300 is not posted", foreign),
        lost(check, "dp_x", "dispute dp_x of 40 is not posted", unknown),
    ]


def test_commands_that_were_rejected_and_invoices_without_one(
    session: Session, snapshot: ProviderSnapshot
) -> None:
    check = "outbox/stripe"
    session.get_one(BillingAccount, "acme").collection = "stripe"
    invoice_row(session, 1)
    invoice_row(session, 2, sent=False, external_id=None, due_minor=1)
    invoice_row(session, 3, sent=False, external_id=None, status="paid")
    invoice_row(session, 4, sent=False, external_id=None, due_minor=0)
    invoice_row(session, 5, sent=False, external_id=None)
    invoice_row(session, 6, sent=False, external_id=None)
    command_row(session, "inv_05", provider="fake")
    command_row(session, "inv_06", "close", failed=True, last_error="not so")
    command_row(session, "inv_01", "lower", failed=True, last_error="no", provider="fake")
    assert found(session, snapshot, check) == [
        lost(check, "inv_02", "invoice TH-02 was not sent to stripe"),
        lost(check, "inv_05", "invoice TH-05 was not sent to stripe"),
        lost(check, "inv_06", "command close was rejected: not so"),
        lost(check, "inv_06", "invoice TH-06 was not sent to stripe"),
    ]
    session.get_one(BillingAccount, "acme").collection = "manual"
    (rejected,) = found(session, snapshot, check)
    assert rejected.difference.message == "command close was rejected: not so"


def test_the_cash_of_payments_refunds_and_disputes(
    session: Session, snapshot: ProviderSnapshot
) -> None:
    check = "stripe/ledger"

    def _cash(reference: str, cents: int) -> None:
        money = Money(abs(cents) * CENT, "USD")
        sides = (AccountKind.CASH, AccountKind.BAD_DEBT)
        entries = transfer(*(sides if cents > 0 else sides[::-1]), money)
        post(session, Transaction("acme", "payment", reference, START, entries))

    for name, fields in (
        ("a", {}),
        ("b", {}),
        ("c", {"external_id": None}),
        ("d", {"status": settlement.FAILED}),
        ("e", {"status": settlement.FAILED}),
        ("f", {"provider": "manual"}),
    ):
        payment_row(session, name, **fields)
    _cash("payment:pay_a", 300)
    _cash("grant:payment:pay_a", 200)
    _cash("payment:pay_b", 501)
    _cash("payment:pay_e", 500)
    for name, status in (("a", "succeeded"), ("b", "pending"), ("c", "failed"), ("d", "failed")):
        refund_row(session, name, status=status)
    refund_row(session, "e", provider="manual")
    _cash("refund:back a", -150)
    _cash("refund:back c", -200)
    _cash("back:refund:back c", 120)
    _cash("grant:back:refund:back c", 80)
    _cash("refund:back d", -200)
    for name, withdrawn in (("a", True), ("b", False), ("c", True), ("d", False)):
        dispute_row(session, name, withdrawn=withdrawn)
    dispute_row(session, "e", provider="manual")
    _cash("dispute:dp_a", -300)
    _cash("dispute:dp_d", -300)

    def _says(name: str, what: str, have: int, wanted: int) -> ProviderDifference:
        message = f"the ledger has {have * CENT} units of cash for {what}, expected {wanted * CENT}"
        return off(check, name, have - wanted, message)

    assert found(session, snapshot, check) == [
        _says("dispute:dp_c", "dispute:dp_c", 0, -300),
        _says("dispute:dp_d", "dispute:dp_d", -300, 0),
        _says("pay_c", "payment pay_c", 0, 500),
        _says("pi_b", "payment pay_b", 501, 500),
        _says("pi_e", "payment pay_e", 500, 0),
        _says("refund:back a", "refund:back a", -150, -200),
        _says("refund:back b", "refund:back b", 0, -200),
        _says("refund:back d", "refund:back d", -200, 0),
    ]
