"""Fees that are earned later, and money of payments that leaves and returns: each posting, in cents."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.invoicing import recognition
from billing.invoicing.tables import Invoice, InvoiceLine
from billing.ledger import credits
from billing.ledger.ledger import AccountKind, Transaction, post, transfer
from billing.ledger.tables import CreditUse, LedgerAccount, LedgerEntry, LedgerTransaction
from billing.payments import withdrawals
from billing.payments.settlement import begin_payment, succeed
from billing.payments.tables import Dispute, Payment, Refund
from billing.payments.withdrawals import Withdrawal
from core.errors import Conflict
from core.money import Money
from tests.billing.conftest import START
from tests.billing.payments.provider_rows import invoice_row

CENT, DAY, MOMENT = 10**10, timedelta(days=1), timedelta(microseconds=1)
FEB, MAR, APR = (datetime(2026, month, 1, tzinfo=UTC) for month in (2, 3, 4))
FINAL = FEB + timedelta(hours=3)


def _posted(session: Session, *kinds: str) -> list[tuple[Any, ...]]:
    """Reference, time, memo, and cents by account of each transaction of these kinds."""
    found = []
    rows = session.scalars(
        select(LedgerTransaction)
        .where(LedgerTransaction.kind.in_(kinds))
        .order_by(LedgerTransaction.at, LedgerTransaction.reference)
    )
    for each in rows:
        entries = session.execute(
            select(LedgerAccount.kind, LedgerEntry.units)
            .join(LedgerAccount, LedgerAccount.id == LedgerEntry.account_id)
            .where(LedgerEntry.transaction_id == each.id)
        )
        sums: dict[str, int] = {}
        for kind, units in entries:
            sums[kind] = sums.get(kind, 0) + units
        cents = {kind: units // CENT for kind, units in sums.items()}
        found.append((each.reference, each.at, each.memo, cents))
    return found


def _fee(session: Session, number: int, cents: int, ends: datetime, **fields: Any) -> InvoiceLine:
    """A line of a fee from January 31 on, on the invoice of January."""
    invoice_row(session, number, sent=False, status="draft", final_at=FINAL)
    plain = {"kind": "base_fee", "description": "Base fee", "starts_at": FEB - DAY, "ends_at": ends}
    line = InvoiceLine(
        invoice_id=f"inv_{number:02}",
        position=1,
        exact=cents * CENT,
        amount_minor=cents,
        **plain | fields,
    )
    session.add(line)
    session.flush()
    session.get_one(Invoice, f"inv_{number:02}").status = "final"
    session.flush()
    return line


def test_a_fee_is_deferred_and_earned_by_the_month(session: Session) -> None:
    """59 days from January 31 to March 31: 1, 28 and 30 of them, a cent each."""
    line = _fee(session, 1, 59, APR - DAY)
    _fee(session, 2, 5, FEB)  # within its invoice's period
    _fee(session, 3, 5, APR, kind="commitment")
    invoice_row(session, 4, sent=False, status="draft")
    assert recognition.tenants_with_deferred(session) == ["acme"]
    assert [each.line.id for each in recognition.deferred_lines(session)] == [line.id]
    assert recognition.deferred_lines(session, "birch") == []
    assert recognition.recognise(session, MAR - MOMENT) == 2
    assert recognition.recognise(session, MAR - MOMENT) == 0
    deferral = (f"deferral:{line.id}", FINAL, "Base fee", {"revenue": 59, "deferred": -59})
    january = (f"recognition:{line.id}:2026-01", FINAL, "Base fee, 2026-01")
    assert _posted(session, "deferral") == [deferral]
    assert _posted(session, "recognition") == [(*january, {"deferred": 1, "revenue": -1})]
    assert recognition.recognise(session, MAR, "acme") == 1
    assert _posted(session, "recognition")[1] == (
        f"recognition:{line.id}:2026-02",
        MAR - MOMENT,
        "Base fee, 2026-02",
        {"deferred": 28, "revenue": -28},
    )
    months = [("2026-01", 1), ("2026-02", 28), ("2026-03", 30)]
    assert recognition.schedule(session) == [
        {"month": month, "currency": "USD", "units": cents * CENT} for month, cents in months
    ]
    session.get_one(Invoice, "inv_01").status = "void"
    session.flush()
    assert recognition.schedule(session) == []
    assert recognition.recognise(session, MAR + DAY) == 1, "a void invoice releases the rest"
    assert _posted(session, "recognition")[2][1:] == (
        MAR + DAY,
        "Base fee, 2026-03",
        {"deferred": 30, "revenue": -30},
    )


def test_seats_and_add_ons_and_what_is_returned_of_them(session: Session) -> None:
    for number, kind, cents in ((1, "seats", 59), (2, "add_on", -59)):
        _fee(session, number, cents, APR - DAY, kind=kind)
    assert len(recognition.deferred_lines(session)) == 2
    assert recognition.schedule(session) == [], "both together earn nothing"


@pytest.fixture
def paid(session: Session) -> Payment:
    """10.00 for an invoice of 10.00, of which nothing is left."""
    invoice_row(session, 1, sent=False)
    return _pay(session, 1000, "a", invoice_id="inv_01")


def _pay(session: Session, cents: int, name: str, **fields: Any) -> Payment:
    given = {"tenant_id": "acme", "invoice_id": None, "currency": "USD", "provider": "stripe"}
    made = begin_payment(
        session, amount_minor=cents, reference=name, at=START, external_id=name, **given | fields
    )
    succeed(session, made, START)
    return made


def _withdraw(session: Session, payment: Payment, cents: int, name: str, **fields: Any) -> None:
    """As a refund that is written down, so that its postings count as the payment's."""
    cause = Withdrawal(f"refund:{name}", START + DAY, reason="why", **fields)
    withdrawals.withdraw(session, payment, cents, cause)
    row = {"tenant_id": "acme", "provider": "stripe", "currency": "USD", "status": "succeeded"}
    made = Refund(
        id=name,
        payment_id=payment.id,
        reference=name,
        amount_minor=cents,
        reason="",
        created_at=START,
        **row,
    )
    session.add(made)
    session.flush()


def _back(session: Session, payment: Payment, cents: int, name: str) -> None:
    withdrawals.reverse_withdrawal(session, payment, cents, f"refund:{name}", START + 2 * DAY)


def test_money_of_an_invoice_leaves_it_open_and_pays_it_again(
    session: Session, paid: Payment
) -> None:
    invoice = session.get_one(Invoice, "inv_01")
    assert (invoice.status, invoice.paid_minor) == ("paid", 1000)
    _withdraw(session, paid, 400, "r")
    assert (invoice.status, invoice.paid_minor) == ("final", 600)
    assert _posted(session, "refund") == [
        ("refund:r", START + DAY, "why", {"receivable": 400, "cash": -400})
    ]
    _back(session, paid, 400, "r")
    assert (invoice.status, invoice.paid_minor) == ("paid", 1000)
    assert _posted(session, "reversal") == [
        ("back:refund:r", START + 2 * DAY, "", {"cash": 400, "receivable": -400})
    ]


def test_money_that_neither_holds_is_refused_or_a_bad_debt(session: Session, paid: Payment) -> None:
    said = "The invoice and the wallet hold 1000 of 1001 minor units"
    with pytest.raises(Conflict, match=said):
        _withdraw(session, paid, 1001, "r")
    _withdraw(session, paid, 1100, "q", beyond_wallet=True)
    (found,) = _posted(session, "refund")
    assert found[3] == {"receivable": 1000, "cash": -1100, "bad_debt": 100}
    _back(session, paid, 1100, "q")
    (again,) = _posted(session, "reversal")
    assert again[3] == {"cash": 1100, "bad_debt": -100, "receivable": -1000}


def test_an_overpayment_leaves_the_wallet_first(session: Session, paid: Payment) -> None:
    more = _pay(session, 300, "b", invoice_id="inv_01")
    _withdraw(session, more, 200, "r")
    assert _posted(session, "refund")[0][3] == {"prepaid": 200, "cash": -200}
    used = session.scalars(select(CreditUse)).one()
    assert (used.units, used.purpose, used.bill_period_id) == (200 * CENT, "refund", None)
    assert session.get_one(Invoice, "inv_01").status == "paid"
    _withdraw(session, paid, 100, "s")
    assert _posted(session, "refund")[1][3] == {"receivable": 100, "cash": -100}, "not its wallet"
    _back(session, more, 200, "r")
    grants = _posted(session, "topup", "grant")
    assert session.get_one(Invoice, "inv_01").paid_minor == 900, "what came from the wallet returns"
    assert grants[-1][0] == "grant:back:refund:r"


def test_a_wallet_that_is_spent_gives_what_is_left(session: Session) -> None:
    top_up = _pay(session, 500, "a")
    grant = credits.open_grants(session, ["acme"], START)["acme"][0]
    spent = Money(450 * CENT + 3, "USD")
    entries = transfer(AccountKind.PREPAID, AccountKind.REVENUE, spent)
    post(session, Transaction("acme", "usage", "spent", START, entries))
    grant.remaining -= spent.units
    session.flush()
    with pytest.raises(Conflict, match="hold 49 of 50 minor units"):
        _withdraw(session, top_up, 50, "r")
    _withdraw(session, top_up, 50, "q", beyond_wallet=True, kind=withdrawals.DISPUTE)
    (found,) = _posted(session, "dispute")
    assert found[0] == "refund:q" and found[3]["cash"] == -50
    assert grant.remaining == 0, "to the last picounit"
    rows = session.scalars(
        select(LedgerEntry.units)
        .join(LedgerAccount, LedgerAccount.id == LedgerEntry.account_id)
        .where(LedgerAccount.kind == "bad_debt")
    )
    assert list(rows) == [3]


def test_what_was_paid_too_much_after_a_credit_note_goes_first(
    session: Session, paid: Payment
) -> None:
    invoice = session.get_one(Invoice, "inv_01")
    invoice.credited_minor = 300
    session.flush()
    _pay(session, 100, "w")
    _withdraw(session, paid, 350, "r")
    assert _posted(session, "refund")[0][3] == {"receivable": 350, "cash": -350}
    assert (invoice.paid_minor, invoice.status) == (650, "final")


def test_disputes_of_a_payment_count_as_its_money(session: Session, paid: Payment) -> None:
    cause = Withdrawal("dispute:dp_1", START + DAY, withdrawals.DISPUTE, "bank", True)
    withdrawals.withdraw(session, paid, 600, cause)
    row = {"tenant_id": "acme", "provider": "stripe", "currency": "USD", "status": "open"}
    made = Dispute(
        id="d", payment_id=paid.id, external_id="dp_1", amount_minor=600, opened_at=START, **row
    )
    session.add(made)
    session.flush()
    with pytest.raises(Conflict, match="hold 400 of 500 minor units"):
        _withdraw(session, paid, 500, "r")
    withdrawals.reverse_withdrawal(session, paid, 600, "dispute:dp_1", START + 2 * DAY)
    _withdraw(session, paid, 500, "r")
    assert session.get_one(Invoice, "inv_01").paid_minor == 500
