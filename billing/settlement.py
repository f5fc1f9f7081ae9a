"""Payments, refunds, voids and write-offs of final invoices, each posted once per reference."""

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing import credits, webhooks
from billing.accounts import lock_account
from billing.invoices import DRAFT, FINAL, PAID, UNCOLLECTIBLE, VOID
from billing.ledger import (
    AccountKind,
    Entry,
    Transaction,
    balance,
    post,
    posted_to,
    transfer,
)
from billing.models import (
    CreditUse,
    Invoice,
    LedgerAccount,
    LedgerEntry,
    LedgerTransaction,
    Payment,
    Refund,
)
from core.errors import BadRequest, Conflict, NotFound
from core.ids import new_id
from core.money import Money, format_minor, units_of_minor

PENDING, SUCCEEDED, FAILED = "pending", "succeeded", "failed"


def open_minor(invoice: Invoice) -> int:
    """The open amount in minor units."""
    if invoice.status in (DRAFT, VOID, UNCOLLECTIBLE):
        return 0
    return invoice.due_minor - invoice.paid_minor - invoice.credited_minor


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
) -> Payment:
    """Create a pending payment, one per reference. Without an invoice it is a wallet top-up."""
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
        id=new_id("pay"),
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
        invoice = _locked(session, payment.invoice_id)
        part = min(rest, max(0, open_minor(invoice)))
        if part:
            money = Money(units_of_minor(part, payment.currency), payment.currency)
            entries = transfer(AccountKind.CASH, AccountKind.RECEIVABLE, money)
            reference = f"payment:{payment.id}"
            post(session, Transaction(payment.tenant_id, "payment", reference, at, entries))
            invoice.paid_minor += part
            _settle(invoice, at)
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
) -> Refund:
    """Post a refund, once per reference. A top-up is refunded from the wallet; an invoice becomes
    open again, unless a credit note covers the amount. A pending refund is posted too, so that its
    money cannot be spent; `refund_failed` reverses it.
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
    withdraw(session, payment, amount_minor, f"refund:{reference}", at, reason=reason)
    payment.refunded_minor += amount_minor
    record = Refund(
        id=new_id("ref"),
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


def withdraw(
    session: Session,
    payment: Payment,
    amount_minor: int,
    reference: str,
    at: datetime,
    *,
    kind: str = "refund",
    reason: str = "",
    beyond_wallet: bool = False,
) -> None:
    """Post money of a payment that leaves again. With `beyond_wallet` (disputes), whatever the wallet
    no longer holds is written off as bad debt. Hold the account's lock.
    """
    money = Money(units_of_minor(amount_minor, payment.currency), payment.currency)
    if payment.invoice_id is None:
        _take_from_wallet(session, payment.tenant_id, money, reference, at, kind, beyond_wallet)
        return
    invoice = _locked(session, payment.invoice_id)
    entries = transfer(AccountKind.RECEIVABLE, AccountKind.CASH, money)
    post(session, Transaction(payment.tenant_id, kind, reference, at, entries, reason))
    invoice.paid_minor -= amount_minor
    _settle(invoice, at)
    session.flush()


def reverse_withdrawal(
    session: Session, payment: Payment, amount_minor: int, reference: str, at: datetime
) -> None:
    """Reverse the withdrawal posted under the reference. Hold the account's lock."""
    currency = payment.currency
    money = Money(units_of_minor(amount_minor, currency), currency)
    again = f"back:{reference}"
    if payment.invoice_id is not None:
        invoice = _locked(session, payment.invoice_id)
        entries = transfer(AccountKind.CASH, AccountKind.RECEIVABLE, money)
        post(session, Transaction(payment.tenant_id, "reversal", again, at, entries))
        invoice.paid_minor += amount_minor
        _settle(invoice, at)
        session.flush()
        return
    lost = posted_to(session, reference, AccountKind.BAD_DEBT)
    if lost:
        entries = transfer(AccountKind.CASH, AccountKind.BAD_DEBT, Money(lost, currency))
        post(session, Transaction(payment.tenant_id, "reversal", again, at, entries))
    if money.units > lost:
        credits.grant(
            session,
            tenant_id=payment.tenant_id,
            kind=credits.PREPAID,
            money=Money(money.units - lost, currency),
            reference=again,
            at=at,
            note="withdrawn payment returned",
        )


def write_off(session: Session, invoice_id: str, at: datetime) -> None:
    """Write off the open amount: final -> uncollectible."""
    invoice = _locked(session, invoice_id)
    left = open_minor(invoice)
    if invoice.status != FINAL or left <= 0:
        raise Conflict(
            f"Invoice {invoice.label} is {invoice.status} with {left} minor units open; there is "
            "nothing to write off.",
            next_step="Write off final invoices with an open amount only.",
        )
    money = Money(units_of_minor(left, invoice.currency), invoice.currency)
    entries = transfer(AccountKind.BAD_DEBT, AccountKind.RECEIVABLE, money)
    reference = f"write-off:{invoice.id}"
    post(session, Transaction(invoice.tenant_id, "write_off", reference, at, entries))
    invoice.status, invoice.settled_at = UNCOLLECTIBLE, at
    session.flush()


def void(session: Session, invoice_id: str, at: datetime, reason: str) -> None:
    """Void an invoice: reverse its postings and return used credit as new grants."""
    invoice = _locked(session, invoice_id)
    touched = invoice.paid_minor or invoice.credited_minor or invoice.prepaid_minor < 0
    if invoice.status not in (FINAL, PAID) or touched:
        raise Conflict(
            f"Invoice {invoice.label} is {invoice.status}, or has payments or credit notes, and cannot "
            "be voided.",
            next_step="Refund its payments and issue a credit note instead.",
        )
    currency = invoice.currency
    used = session.execute(
        select(CreditUse.kind, CreditUse.units).where(
            CreditUse.bill_period_id == invoice.period_id, CreditUse.purpose == "usage"
        )
    ).all()
    promo = sum(units for kind, units in used if kind == credits.PROMO)
    prepaid = sum(units for kind, units in used if kind == credits.PREPAID)
    due = units_of_minor(invoice.due_minor, currency)
    tax = units_of_minor(invoice.tax_minor, currency)
    rounding = due + promo + prepaid - invoice.exact - tax
    entries = [
        Entry(AccountKind.REVENUE, Money(invoice.exact, currency)),
        Entry(AccountKind.TAX, Money(tax, currency)),
        Entry(AccountKind.ROUNDING, Money(rounding, currency)),
        Entry(AccountKind.RECEIVABLE, Money(-(due + promo + prepaid), currency)),
    ]
    reference = f"void:{invoice.id}"
    shown = tuple(entry for entry in entries if entry.money.units)
    if shown:
        post(session, Transaction(invoice.tenant_id, "void", reference, at, shown, reason))
    for kind, units in ((credits.PROMO, promo), (credits.PREPAID, prepaid)):
        if units > 0:
            credits.grant(
                session,
                tenant_id=invoice.tenant_id,
                kind=kind,
                money=Money(units, currency),
                reference=f"void:{kind}:{invoice.id}",
                at=at,
                note=f"credit of void invoice {invoice.label}",
                funded_by=AccountKind.RECEIVABLE,
            )
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


def _take_from_wallet(
    session: Session,
    tenant_id: str,
    money: Money,
    reference: str,
    at: datetime,
    kind: str,
    beyond: bool,
) -> None:
    grants = credits.open_grants(session, [tenant_id], at).get(tenant_id, [])
    draws = credits.draw(grants, money.units, (credits.PREPAID,))
    taken = sum(each.units for each in draws)
    if taken != money.units and not beyond:
        raise Conflict(
            f"The wallet holds {taken} of {money.units} units to be refunded.",
            next_step="Refund at most what is left in the wallet.",
        )
    parts = ((AccountKind.PREPAID, taken), (AccountKind.BAD_DEBT, money.units - taken))
    entries = [
        entry
        for account, units in parts
        if units
        for entry in transfer(account, AccountKind.CASH, Money(units, money.currency))
    ]
    record = post(session, Transaction(tenant_id, kind, reference, at, tuple(entries)))
    uses = credits.uses_of(
        draws,
        tenant_id=tenant_id,
        purpose=kind,
        bill_period_id=None,
        transaction_id=record,
        at=at,
    )
    credits.insert_uses(session, uses)


def _settle(invoice: Invoice, at: datetime) -> None:
    """Set final or paid according to the open amount."""
    if invoice.status == FINAL and open_minor(invoice) <= 0:
        invoice.status, invoice.settled_at = PAID, at
    elif invoice.status == PAID and open_minor(invoice) > 0:
        invoice.status, invoice.settled_at = FINAL, None


def _locked(session: Session, invoice_id: str) -> Invoice:
    invoice = session.scalar(
        select(Invoice)
        .where(Invoice.id == invoice_id)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    if invoice is None:
        raise NotFound(
            f"There is no invoice {invoice_id!r}.",
            next_step="List invoices with: tollhouse invoice list",
        )
    return invoice
