"""Payments, refunds, voids and write-offs as they are stored, posted and told, with every field."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import delete, func, select, text
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from billing.invoicing import credit_notes, open_amounts
from billing.invoicing.tables import Invoice
from billing.ledger import credits
from billing.ledger.ledger import AccountKind
from billing.ledger.tables import CreditGrant, LedgerEntry, LedgerTransaction
from billing.notices import webhooks
from billing.notices.tables import OutboxMessage
from billing.payments import settlement
from billing.payments.tables import Payment, Refund
from core.errors import BadRequest, Conflict, NotFound
from core.money import Money
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import START, Deployment
from tests.billing.payments.test_settlement import Customer, customer

__all__ = ["customer"]
CENT, HOUR = 10**10, timedelta(hours=1)


def begin(session: Session, minor: int = 500, name: str = "wire", **fields: Any) -> Payment:
    plain = {"tenant_id": "acme", "invoice_id": None, "currency": "USD", "provider": "manual"}
    return settlement.begin_payment(
        session, amount_minor=minor, reference=name, at=START, **(plain | fields)
    )


def posted(session: Session, reference: str) -> tuple[str, list[int]]:
    found = session.scalars(
        select(LedgerTransaction).where(LedgerTransaction.reference == reference)
    ).one()
    units = session.scalars(
        select(LedgerEntry.units).where(LedgerEntry.transaction_id == found.id)
    ).all()
    return found.kind, sorted(units)


def told(session: Session) -> list[tuple[str, dict[str, Any]]]:
    rows = session.scalars(select(OutboxMessage).order_by(OutboxMessage.id))
    return [(each.subject, each.payload) for each in rows]


def test_a_top_up_is_stored_once_and_told_with_its_outcome(
    lite: Deployment, session: Session
) -> None:
    webhooks.add(session, scope_of_operator("acme"), lite.clock, "https://hooks.example.com/p")
    made = begin(session, external_id="pi_1")
    assert (made.tenant_id, made.invoice_id, made.provider) == ("acme", None, "manual")
    assert (made.amount_minor, made.currency, made.external_id) == (500, "USD", "pi_1")
    assert (made.status, made.created_at, made.settled_at) == ("pending", START, None)
    assert begin(session, 900, currency="EUR") is made, "one a reference"
    settlement.succeed(session, made, START + HOUR)
    settlement.succeed(session, made, START + 2 * HOUR)
    assert (made.status, made.settled_at, made.failure) == ("succeeded", START + HOUR, None)
    grant = session.scalars(select(CreditGrant)).one()
    assert (grant.remaining, grant.note, grant.kind) == (500 * CENT, "top-up", "prepaid")
    assert grant.reference == f"payment:{made.id}"
    assert settlement.wallet(session, "acme", "USD") == 500 * CENT
    assert settlement.cash_by_reference(session) == {f"grant:payment:{made.id}": 500 * CENT}
    settlement.fail(session, made, "too late", START)
    assert (made.status, made.failure) == ("succeeded", None)
    other = begin(session, 1, "other")
    settlement.fail(session, other, "declined", START + HOUR)
    assert (other.status, other.failure, other.settled_at) == ("failed", "declined", START + HOUR)
    plain = {"invoice_id": None, "currency": "USD"}
    assert told(session) == [
        (
            "Payment of 5.00 USD succeeded",
            {"event": "payment.succeeded", "payment_id": made.id, "amount": "5.00"}
            | {"failure": None}
            | plain,
        ),
        (
            "Payment of 0.01 USD failed",
            {"event": "payment.failed", "payment_id": other.id, "amount": "0.01"}
            | {"failure": "declined"}
            | plain,
        ),
    ]
    settlement.succeed(session, other, START + 2 * HOUR)
    assert (other.status, other.failure) == ("succeeded", None), "a second try"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"minor": 0}, "amount is 0 minor units; a payment must be above zero"),
        ({"minor": -1}, "amount is -1 minor units"),
        ({"currency": "EUR"}, "The account is in USD, the payment in EUR"),
    ],
)
def test_a_payment_is_above_zero_and_in_the_account_s_currency(
    lite: Deployment, session: Session, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadRequest, match=reason):
        begin(session, **fields)
    assert begin(session, 1).amount_minor == 1


def test_what_is_paid_too_much_is_credit_and_the_rest_is_posted(customer: Customer) -> None:
    payment = customer.pay(1201, "wire")
    with customer.deployment.database.read() as session:
        paid = ("payment", [-1200 * CENT, 1200 * CENT])
        assert posted(session, f"payment:{payment}") == paid
        grant = session.scalars(select(CreditGrant)).one()
        assert (grant.remaining, grant.note) == (CENT, "overpayment")
    exact = customer.pay(300, "second")
    with customer.deployment.database.read() as session:
        references = set(session.scalars(select(LedgerTransaction.reference)))
    assert f"grant:payment:{exact}" in references and f"payment:{exact}" not in references


def test_a_refund_is_stored_once_and_comes_back_if_it_fails(customer: Customer) -> None:
    payment = customer.pay(1200, "wire")
    database, now = customer.deployment.database, customer.deployment.clock.now()
    with database.transaction() as session:
        paid = session.get_one(Payment, payment)
        made = settlement.refund(session, paid, 1, "r", now, reason="slip", external_id="re_1")
        assert (made.payment_id, made.tenant_id, made.provider) == (payment, "acme", "manual")
        assert (made.amount_minor, made.currency, made.status) == (1, "USD", "succeeded")
        assert (made.reason, made.external_id, made.created_at) == ("slip", "re_1", now)
        assert settlement.refund(session, paid, 9, "r", now) is made
        assert paid.refunded_minor == 1
        for wrong in (0, -1, 1200):
            with pytest.raises(Conflict, match="1199 minor units can be refunded"):
                settlement.refund(session, paid, wrong, "more", now)
        whole = settlement.refund(session, paid, 1199, "rest", now, status="pending")
        assert (whole.status, whole.reason, paid.refunded_minor) == ("pending", "", 1200)
        for again in range(2):
            settlement.refund_failed(session, whole, "returned", now)
            assert (whole.status, whole.reason) == ("failed", "(returned)"), again
            assert paid.refunded_minor == 1
        settlement.refund_failed(session, made, "returned", now)
        assert (made.reason, paid.refunded_minor) == ("slip (returned)", 0)
    customer.has(cash="12")
    assert customer.invoice.status == "paid"
    with database.transaction() as session:
        waiting = begin(session, 700, "pending")
        with pytest.raises(Conflict, match="0 minor units can be refunded"):
            settlement.refund(session, waiting, 1, "early", now)
        assert len(session.scalars(select(Refund)).all()) == 2


def test_a_debt_is_written_off_and_opened_again_as_often_as_needed(customer: Customer) -> None:
    database, now = customer.deployment.database, customer.deployment.clock.now()
    name = customer.invoice_id
    customer.pay(200, "part")
    for number in ("", ":2"):
        with database.transaction() as session:
            with pytest.raises(Conflict, match="is final; it cannot be opened again"):
                settlement.undo_write_off(session, name, now, "paid after all")
            settlement.write_off(session, name, now)
            invoice = session.get_one(Invoice, name)
            assert (invoice.status, invoice.settled_at) == ("uncollectible", now)
            assert posted(session, f"write-off:{name}{number}") == (
                "write_off",
                [-1000 * CENT, 1000 * CENT],
            )
            assert open_amounts.open_minor(invoice) == 0
            assert open_amounts.unpaid_minor(invoice) == 1000
            with pytest.raises(Conflict, match="is uncollectible with 0 minor units open"):
                settlement.write_off(session, name, now)
            settlement.undo_write_off(session, name, now, "paid after all")
            assert (invoice.status, invoice.settled_at) == ("final", None)
            assert posted(session, f"write-off-undo:{name}{number}")[0] == "reversal"
    customer.has(cash="2", receivable="10")
    customer.write_off()
    with database.transaction() as session:
        session.get_one(Invoice, name).external_id = "in_1"
        with pytest.raises(Conflict, match="the payment provider has closed its copy"):
            settlement.undo_write_off(session, name, now, "no")
    customer.has(cash="2", bad_debt="10")


def test_a_paid_invoice_has_nothing_to_write_off(customer: Customer) -> None:
    customer.pay(1200, "wire")
    with pytest.raises(Conflict, match="is paid with 0 minor units open"):
        customer.write_off()


@pytest.mark.parametrize(
    ("column", "value", "refused"),
    [
        ("paid_minor", 1, True),
        ("credited_minor", 1, True),
        ("status", "uncollectible", True),
        ("status", "paid", False),
        ("status", "final", False),
    ],
)
def test_an_invoice_that_nobody_has_touched_is_voided(
    customer: Customer, column: str, value: Any, refused: bool
) -> None:
    database, now = customer.deployment.database, customer.deployment.clock.now()
    with database.transaction() as session:
        setattr(session.get_one(Invoice, customer.invoice_id), column, value)
    if refused:
        with pytest.raises(Conflict, match="and cannot be voided"):
            customer.void()
        return
    customer.void()
    assert (customer.invoice.status, customer.invoice.settled_at) == ("void", now)
    with database.read() as session:
        assert posted(session, f"void:{customer.invoice_id}") == (
            "void",
            [-1200 * CENT, 1200 * CENT],
        )
    with pytest.raises(Conflict, match="is void, or has payments"):
        customer.void()


def test_the_credit_that_a_void_invoice_used_is_granted_again(lite: Deployment) -> None:
    """2.00 promotional and 3.00 prepaid; 7.00 of the 12.00 are due."""
    with lite.database.transaction() as session:
        for kind, dollars in (("promo", 2), ("prepaid", 3)):
            credits.grant(
                session,
                tenant_id="acme",
                kind=kind,
                money=Money(dollars * 100 * CENT),
                reference=kind,
                at=lite.clock.now(),
                priority=5,
            )
    customer = Customer(lite).invoiced()
    assert customer.invoice.due_minor == 700
    customer.void()
    customer.has(cash="3", prepaid="-3")
    with lite.database.read() as session:
        left = select(CreditGrant).where(CreditGrant.remaining > 0).order_by(CreditGrant.kind)
        found = [
            (g.kind, g.remaining, g.priority, g.note, g.reference.rpartition(":")[0])
            for g in session.scalars(left)
        ]
    note, reference = "credit of void invoice TH-000001", f"void:{customer.invoice_id}"
    assert found == [
        ("prepaid", 300 * CENT, 5, note, reference),
        ("promo", 200 * CENT, 5, note, reference),
    ]


@pytest.mark.parametrize(
    ("status", "due", "paid", "credited", "minor", "used", "then"),
    [
        ("final", 100, 0, 0, 99, 99, "final"),
        ("final", 100, 0, 0, 100, 100, "paid"),
        ("final", 100, 30, 30, 100, 40, "paid"),
        ("final", 100, 100, 30, 50, 0, "final"),
        ("uncollectible", 100, 0, 0, 99, 99, "uncollectible"),
        ("uncollectible", 100, 0, 0, 150, 100, "paid"),
        ("void", 100, 0, 0, 50, 0, "void"),
        ("draft", 100, 0, 0, 50, 0, "draft"),
    ],
)
def test_a_payment_covers_what_is_open_and_no_more(
    *, status: str, due: int, paid: int, credited: int, minor: int, used: int, then: str
) -> None:
    invoice = Invoice(
        status=status, due_minor=due, paid_minor=paid, credited_minor=credited, currency="USD"
    )
    part, entries = open_amounts.cover(invoice, minor, START)
    assert (part, invoice.status, invoice.paid_minor) == (used, then, paid + used)
    assert invoice.settled_at == (START if then == "paid" else None)
    debt = AccountKind.BAD_DEBT if status == "uncollectible" else AccountKind.RECEIVABLE
    shown = {each.account: each.money.units for each in entries}
    assert shown == ({AccountKind.CASH: used * CENT, debt: -used * CENT} if used else {})


def test_a_payment_that_is_taken_back_opens_the_invoice() -> None:
    invoice = Invoice(
        status="paid", due_minor=100, paid_minor=100, credited_minor=0, currency="USD"
    )
    assert open_amounts.uncover(invoice, 0, START) == ()
    entries = open_amounts.uncover(invoice, 1, START)
    assert (invoice.status, invoice.paid_minor, invoice.settled_at) == ("final", 99, None)
    shown = {each.account: each.money.units for each in entries}
    assert shown == {AccountKind.RECEIVABLE: CENT, AccountKind.CASH: -CENT}


def test_money_waits_for_the_lock_of_its_account(customer: Customer) -> None:
    """Whoever has no account has no lock, and nothing of theirs is posted."""
    payment, now = customer.pay(1200, "wire"), customer.deployment.clock.now()
    note = customer.note(100)
    with customer.deployment.database.transaction() as session:
        paid = session.get_one(Payment, payment)
        made = settlement.refund(session, paid, 1, "first", now)
        waiting = begin(session, 5, "second")
        gift = credits.grant(
            session, tenant_id="acme", kind="promo", money=Money(5), reference="g", at=now
        )
        session.execute(delete(BillingAccount))
        session.expunge_all()
        acts: dict[str, Callable[[], object]] = {
            "begin": lambda: begin(session, 5, "third"),
            "succeed": lambda: settlement.succeed(session, session.merge(waiting), now),
            "refund": lambda: settlement.refund(session, session.merge(paid), 1, "r", now),
            "failed": lambda: settlement.refund_failed(session, session.merge(made), "x", now),
            "grant": lambda: credits.grant(
                session, tenant_id="acme", kind="promo", money=Money(5), reference="h", at=now
            ),
            "take back": lambda: credits.take_back(session, gift.id, now, "x"),
            "note": lambda: credit_notes.issue(
                session,
                invoice_id=customer.invoice_id,
                net_minor=1,
                reason="",
                reference="n",
                at=now,
            ),
            "cancel": lambda: credit_notes.cancel(session, session.merge(note), "x", now),
        }
        before = session.scalar(select(func.count()).select_from(LedgerTransaction))
        for name, act in acts.items():
            with pytest.raises(NotFound, match="Tenant acme has no billing account"):
                act()
            assert session.scalar(select(func.count()).select_from(LedgerTransaction)) == before, (
                name
            )
        session.rollback()


def test_what_another_transaction_changed_meanwhile_counts(customer: Customer) -> None:
    """The rows are read again under the lock: the session may hold them as they were before."""
    payment, now = customer.pay(1200, "wire"), customer.deployment.clock.now()
    note, name = customer.note(100), customer.invoice_id
    with customer.deployment.database.transaction() as session:
        invoice, paid = session.get_one(Invoice, name), session.get_one(Payment, payment)
        made = settlement.refund(session, paid, 1, "first", now)
        invoice.status  # noqa: B018 - loads what is about to change behind the session's back
        plain = session.connection()
        plain.execute(text("update payments set refunded_minor = 1200"))
        with pytest.raises(Conflict, match="0 minor units can be refunded"):
            settlement.refund(session, paid, 1, "second", now)
        plain.execute(text("update refunds set status = 'failed'"))
        settlement.refund_failed(session, made, "again", now)
        assert (made.status, made.reason) == ("failed", "")
        plain.execute(text("update invoices set status = 'uncollectible'"))
        with pytest.raises(Conflict, match="is uncollectible; only final and paid invoices"):
            credit_notes.issue(
                session, invoice_id=name, net_minor=1, reason="", reference="n", at=now
            )
        session.refresh(invoice)
        plain.execute(text("update invoices set external_id = 'in_1', status = 'paid'"))
        with pytest.raises(Conflict, match="at the payment provider"):
            credit_notes.cancel(session, session.merge(note), "x", now)
        plain.execute(text("update payments set status = 'succeeded', settled_at = null"))
        other = begin(session, 5, "other")
        plain.execute(text("update payments set status = 'succeeded'"))
        settlement.succeed(session, other, now)
        assert session.get(CreditGrant, f"payment:{other.id}") is None
        assert session.scalar(select(func.count()).select_from(CreditGrant)) == 1, "of the note"
        session.rollback()
