"""Payments, refunds, voids and write-offs of final invoices, each posted once per reference."""

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_account
from billing.invoicing import child_invoices, promoted_fees, returned_fees
from billing.invoicing.invoices import FINAL, PAID, UNCOLLECTIBLE, VOID
from billing.invoicing.open_amounts import cover, locked_invoice, open_minor, unpaid_minor
from billing.ledger import credits
from billing.ledger.ledger import AccountKind, Entry, Transaction, balance, post, transfer
from billing.ledger.tables import CreditUse, LedgerAccount, LedgerEntry, LedgerTransaction
from billing.notices import webhooks
from billing.payments.tables import Payment, Refund
from billing.payments.withdrawals import Withdrawal, reverse_withdrawal, withdraw
from core.errors import BadRequest, Conflict
from core.ids import derived_id
from core.money import Money, format_minor, units_of_minor

PENDING, SUCCEEDED, FAILED = "pending", "succeeded", "failed"
__all__ = [
    "FAILED",
    "PENDING",
    "SUCCEEDED",
    "begin_payment",
    "cash_by_reference",
    "fail",
    "open_minor",
    "refund",
    "refund_failed",
    "succeed",
    "undo_write_off",
    "void",
    "wallet",
    "write_off",
]


def begin_payment(
    session: Session,
    *,
    tenant_id: str,
    invoice_id: str | None,
    amount_minor: int,
    currency: str,
    provider: str,
    reference: str,
    at: datetime,
    external_id: str | None = None,
    payment_id: str | None = None,
) -> Payment:
    """Create a pending payment, one per reference. Without an invoice it is a wallet top-up. A payment
    that the provider knows from before a restore keeps its id."""
    known = session.scalar(select(Payment).where(Payment.reference == reference))
    if known is not None:
        return known
    if amount_minor <= 0:
        raise BadRequest(
            f"amount is {amount_minor} minor units; a payment must be above zero.", param="amount"
        )
    account = lock_account(session, tenant_id)
    if account.currency != currency:
        raise BadRequest(
            f"The account is in {account.currency}, the payment in {currency}.",
            next_step=f"Pay in {account.currency}.",
            code="currency_mismatch",
        )
    record = Payment(
        id=payment_id or derived_id("pay", tenant_id, reference),
        tenant_id=tenant_id,
        invoice_id=invoice_id,
        provider=provider,
        external_id=external_id,
        reference=reference,
        currency=currency,
        amount_minor=amount_minor,
        status=PENDING,
        created_at=at,
    )
    session.add(record)
    session.flush()
    return record


def succeed(session: Session, payment: Payment, at: datetime) -> None:
    """Post a received payment. Any excess over the open amount goes to the wallet. Idempotent."""
    lock_account(session, payment.tenant_id)
    session.refresh(payment)
    if payment.status == SUCCEEDED:
        return
    payment.status, payment.settled_at, payment.failure = SUCCEEDED, at, None
    session.flush()
    rest = payment.amount_minor
    if payment.invoice_id is not None:
        part, entries = cover(locked_invoice(session, payment.invoice_id), rest, at)
        if part:
            reference = f"payment:{payment.id}"
            post(session, Transaction(payment.tenant_id, "payment", reference, at, entries))
            rest -= part
    if rest:
        credits.grant(
            session,
            tenant_id=payment.tenant_id,
            kind=credits.PREPAID,
            money=Money(units_of_minor(rest, payment.currency), payment.currency),
            reference=f"payment:{payment.id}",
            at=at,
            note="top-up" if payment.invoice_id is None else "overpayment",
        )
    session.flush()
    _notify(session, payment, "payment.succeeded", at)


def fail(session: Session, payment: Payment, reason: str, at: datetime) -> None:
    """Mark a payment as failed, unless it has succeeded."""
    if payment.status != SUCCEEDED:
        payment.status, payment.failure, payment.settled_at = FAILED, reason, at
        session.flush()
        _notify(session, payment, "payment.failed", at)


def _notify(session: Session, payment: Payment, event: str, at: datetime) -> None:
    """Notify webhooks, once per payment and outcome."""
    amount = format_minor(payment.amount_minor, payment.currency)
    payload = {
        "payment_id": payment.id,
        "invoice_id": payment.invoice_id,
        "amount": amount,
        "currency": payment.currency,
        "failure": payment.failure,
    }
    subject = f"Payment of {amount} {payment.currency} {event.partition('.')[2]}"
    cause = webhooks.Notification(payment.tenant_id, event, subject, payment.id, payload)
    webhooks.notify(session, [cause], at)


def refund(
    session: Session,
    payment: Payment,
    amount_minor: int,
    reference: str,
    at: datetime,
    *,
    reason: str = "",
    external_id: str | None = None,
    status: str = SUCCEEDED,
    beyond_wallet: bool = False,
) -> Refund:
    """Post a refund, once per reference; `withdrawals.withdraw` says where its money is taken from.
    A pending refund is posted too, so that its money cannot be spent; `refund_failed` reverses it.
    With `beyond_wallet` the money has already left at the provider.
    """
    known = session.scalar(select(Refund).where(Refund.reference == reference))
    if known is not None:
        return known
    lock_account(session, payment.tenant_id)
    session.refresh(payment)
    left = payment.amount_minor - payment.refunded_minor
    if payment.status != SUCCEEDED or not 0 < amount_minor <= left:
        raise Conflict(
            f"amount_minor is {amount_minor}; of payment {payment.id} "
            f"{max(0, left) if payment.status == SUCCEEDED else 0} minor units can be refunded.",
            next_step="Refund at most that amount.",
        )
    cause = Withdrawal(f"refund:{reference}", at, reason=reason, beyond_wallet=beyond_wallet)
    withdraw(session, payment, amount_minor, cause)
    payment.refunded_minor += amount_minor
    record = Refund(
        id=derived_id("ref", payment.external_id or payment.id, reference),
        payment_id=payment.id,
        tenant_id=payment.tenant_id,
        provider=payment.provider,
        external_id=external_id,
        reference=reference,
        currency=payment.currency,
        amount_minor=amount_minor,
        status=status,
        reason=reason,
        created_at=at,
    )
    session.add(record)
    session.flush()
    return record


def refund_failed(session: Session, record: Refund, reason: str, at: datetime) -> None:
    """Reverse a refund that the bank returned or the provider rejected. Idempotent."""
    payment = session.get_one(Payment, record.payment_id)
    lock_account(session, payment.tenant_id)
    session.refresh(payment)
    session.refresh(record)
    if record.status == FAILED:
        return
    reverse_withdrawal(session, payment, record.amount_minor, f"refund:{record.reference}", at)
    payment.refunded_minor -= record.amount_minor
    record.status, record.reason = FAILED, f"{record.reason} ({reason})".strip()
    session.flush()


def write_off(session: Session, invoice_id: str, at: datetime) -> None:
    """Write off the open amount: final -> uncollectible."""
    invoice = locked_invoice(session, invoice_id)
    if invoice.status == FINAL:
        returned_fees.lower_before_write_off(session, invoice, at)
        if invoice.status == PAID:
            return  # by credit of fees that came back
    left = open_minor(invoice)
    if invoice.status != FINAL or left <= 0:
        raise Conflict(
            f"Invoice {invoice.label} is {invoice.status} with {left} minor units open; there is "
            "nothing to write off.",
            next_step="Write off final invoices with an open amount only.",
        )
    money = Money(units_of_minor(left, invoice.currency), invoice.currency)
    entries = transfer(AccountKind.BAD_DEBT, AccountKind.RECEIVABLE, money)
    reference = _next_reference(session, f"write-off:{invoice.id}")
    post(session, Transaction(invoice.tenant_id, "write_off", reference, at, entries))
    invoice.status, invoice.settled_at = UNCOLLECTIBLE, at
    session.flush()


def undo_write_off(session: Session, invoice_id: str, at: datetime, note: str) -> None:
    """Open the invoice again: uncollectible -> final. What is recovered of the debt stays paid."""
    invoice = locked_invoice(session, invoice_id)
    left = unpaid_minor(invoice)
    if invoice.status != UNCOLLECTIBLE or invoice.external_id is not None:
        told = "the payment provider has closed its copy, and " if invoice.external_id else ""
        raise Conflict(
            f"Invoice {invoice.label} is {invoice.status}; {told}it cannot be opened again.",
            next_step="Only a write-off in force, of an invoice that is not at a provider, is undone.",
        )
    money = Money(units_of_minor(left, invoice.currency), invoice.currency)
    entries = transfer(AccountKind.RECEIVABLE, AccountKind.BAD_DEBT, money)
    reference = _next_reference(session, f"write-off-undo:{invoice.id}")
    post(session, Transaction(invoice.tenant_id, "reversal", reference, at, entries, note))
    invoice.status, invoice.settled_at = FINAL, None
    session.flush()


def _next_reference(session: Session, stem: str) -> str:
    """The stem, numbered from the second time on: what was undone may be done again."""
    posted = select(func.count()).where(
        (LedgerTransaction.reference == stem) | LedgerTransaction.reference.startswith(f"{stem}:")
    )
    before = session.scalar(posted) or 0
    return f"{stem}:{before + 1}" if before else stem


def void(session: Session, invoice_id: str, at: datetime, reason: str) -> None:
    """Void an invoice: reverse its postings and return used credit as new grants."""
    invoice = locked_invoice(session, invoice_id)
    touched = invoice.paid_minor or invoice.credited_minor or invoice.prepaid_minor < 0
    if invoice.status not in (FINAL, PAID) or touched:
        raise Conflict(
            f"Invoice {invoice.label} is {invoice.status}, or has payments or credit notes, and cannot "
            "be voided.",
            next_step="Refund its payments and issue a credit note instead.",
        )
    promoted_fees.refuse_void(session, invoice)
    returned_fees.refuse_void(session, invoice)
    child_invoices.release(session, invoice)
    currency = invoice.currency
    used = credits.uses_in(
        session,
        CreditUse.bill_period_id == invoice.period_id,
        CreditUse.purpose == "usage",
    )
    used = credits.less_returned(session, used, invoice.id)
    credit = sum(each.units for each in used)
    due = units_of_minor(invoice.due_minor, currency)
    tax = units_of_minor(invoice.tax_minor, currency)
    rounding = due + credit - invoice.exact - tax
    entries = [
        Entry(AccountKind.REVENUE, Money(invoice.exact, currency)),
        Entry(AccountKind.TAX, Money(tax, currency)),
        Entry(AccountKind.ROUNDING, Money(rounding, currency)),
        Entry(AccountKind.RECEIVABLE, Money(-(due + credit), currency)),
    ]
    reference = _next_reference(session, f"void:{invoice.id}")
    shown = tuple(entry for entry in entries if entry.money.units)
    if shown:
        post(session, Transaction(invoice.tenant_id, "void", reference, at, shown, reason))
    note = f"credit of void invoice {invoice.label}"
    cause = credits.Return(reference, at, note, AccountKind.RECEIVABLE)
    credits.give_back(session, used, cause)
    invoice.status, invoice.settled_at = VOID, at
    session.flush()


def wallet(session: Session, tenant_id: str, currency: str) -> int:
    """Picounits of prepaid credit left."""
    return -balance(session, tenant_id, AccountKind.PREPAID, currency)


def cash_by_reference(session: Session) -> dict[str, int]:
    """Picounits posted to cash, by reference."""
    rows = session.execute(
        select(LedgerTransaction.reference, func.sum(LedgerEntry.units))
        .join(LedgerEntry, LedgerEntry.transaction_id == LedgerTransaction.id)
        .join(LedgerAccount, LedgerAccount.id == LedgerEntry.account_id)
        .where(LedgerAccount.kind == AccountKind.CASH.value)
        .group_by(LedgerTransaction.reference)
    )
    return {reference: int(units) for reference, units in rows}
