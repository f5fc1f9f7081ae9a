"""What happens to a final invoice: payments, refunds, void, write-off. Each cause is posted once."""

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing import credits
from billing.accounts import lock_account
from billing.invoices import DRAFT, FINAL, PAID, UNCOLLECTIBLE, VOID
from billing.ledger import AccountKind, Entry, Transaction, balance, post, transfer
from billing.models import CreditUse, Invoice, Payment, Refund
from core.errors import BadRequest, Conflict, NotFound
from core.ids import new_id
from core.money import Money, units_of_minor

PENDING, SUCCEEDED, FAILED = "pending", "succeeded", "failed"


def open_minor(invoice: Invoice) -> int:
    """What is still to be paid."""
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
    """A pending payment, one per reference. Without an invoice it is a top-up of the wallet."""
    known = session.scalar(select(Payment).where(Payment.reference == reference))
    if known is not None:
        return known
    if amount_minor <= 0:
        raise BadRequest("A payment is a positive amount.", param="amount")
    account = lock_account(session, tenant_id)
    if account.currency != currency:
        raise BadRequest(
            f"The account is in {account.currency}, the payment in {currency}.",
            next_step=f"Pay in {account.currency}.",
            code="currency_mismatch",
        )
    made = Payment(
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
    session.add(made)
    session.flush()
    return made


def succeed(session: Session, payment: Payment, at: datetime) -> None:
    """The money came. What is above the invoice's open amount goes to the wallet. Twice is once."""
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
            note="top-up" if payment.invoice_id is None else "paid more than was due",
        )
    session.flush()


def fail(session: Session, payment: Payment, reason: str, at: datetime) -> None:
    """The money did not come. A payment that succeeded before stays so."""
    if payment.status != SUCCEEDED:
        payment.status, payment.failure, payment.settled_at = FAILED, reason, at
        session.flush()


def refund(
    session: Session,
    payment: Payment,
    amount_minor: int,
    reference: str,
    at: datetime,
    *,
    reason: str = "",
    external_id: str | None = None,
) -> Refund:
    """Money goes back, once per reference: of a top-up from the wallet, of an invoice it is owed
    again, unless a credit note has taken it off before.
    """
    known = session.scalar(select(Refund).where(Refund.reference == reference))
    if known is not None:
        return known
    lock_account(session, payment.tenant_id)
    session.refresh(payment)
    left = payment.amount_minor - payment.refunded_minor
    if payment.status != SUCCEEDED or not 0 < amount_minor <= left:
        raise Conflict(
            f"Of this payment {max(0, left) if payment.status == SUCCEEDED else 0} can be refunded.",
            next_step="Refund at most that, in minor units.",
        )
    money = Money(units_of_minor(amount_minor, payment.currency), payment.currency)
    if payment.invoice_id is None:
        _take_from_wallet(session, payment.tenant_id, money, f"refund:{reference}", at)
    else:
        invoice = _locked(session, payment.invoice_id)
        entries = transfer(AccountKind.RECEIVABLE, AccountKind.CASH, money)
        post(
            session,
            Transaction(payment.tenant_id, "refund", f"refund:{reference}", at, entries, reason),
        )
        invoice.paid_minor -= amount_minor
        _settle(invoice, at)
    payment.refunded_minor += amount_minor
    made = Refund(
        id=new_id("ref"),
        payment_id=payment.id,
        tenant_id=payment.tenant_id,
        provider=payment.provider,
        external_id=external_id,
        reference=reference,
        currency=payment.currency,
        amount_minor=amount_minor,
        status=SUCCEEDED,
        reason=reason,
        created_at=at,
    )
    session.add(made)
    session.flush()
    return made


def write_off(session: Session, invoice_id: str, at: datetime) -> None:
    """Nobody expects the rest any more: final -> uncollectible."""
    invoice = _locked(session, invoice_id)
    left = open_minor(invoice)
    if invoice.status != FINAL or left <= 0:
        raise Conflict(f"Invoice {invoice.label} is {invoice.status}: nothing to write off.")
    money = Money(units_of_minor(left, invoice.currency), invoice.currency)
    entries = transfer(AccountKind.BAD_DEBT, AccountKind.RECEIVABLE, money)
    reference = f"write-off:{invoice.id}"
    post(session, Transaction(invoice.tenant_id, "write_off", reference, at, entries))
    invoice.status, invoice.settled_at = UNCOLLECTIBLE, at
    session.flush()


def void(session: Session, invoice_id: str, at: datetime, reason: str) -> None:
    """As if it had never been sent: what is due is taken back, used credit returns as a grant."""
    invoice = _locked(session, invoice_id)
    touched = invoice.paid_minor or invoice.credited_minor or invoice.prepaid_minor < 0
    if invoice.status not in (FINAL, PAID) or touched:
        raise Conflict(
            f"Invoice {invoice.label} is {invoice.status}, or money has moved for it.",
            next_step="Refund and credit it instead.",
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
    """Picounits of prepaid credit that are left."""
    return -balance(session, tenant_id, AccountKind.PREPAID, currency)


def _take_from_wallet(
    session: Session, tenant_id: str, money: Money, reference: str, at: datetime
) -> None:
    grants = credits.open_grants(session, [tenant_id], at).get(tenant_id, [])
    draws = credits.draw(grants, money.units, (credits.PREPAID,))
    if sum(each.units for each in draws) != money.units:
        raise Conflict(
            "The wallet does not hold that much any more.", next_step="Refund what is left in it."
        )
    entries = transfer(AccountKind.PREPAID, AccountKind.CASH, money)
    made = post(session, Transaction(tenant_id, "refund", reference, at, entries))
    credits.keep_uses(
        session,
        draws,
        tenant_id=tenant_id,
        purpose="refund",
        bill_period_id=None,
        transaction_id=made,
        at=at,
    )


def _settle(invoice: Invoice, at: datetime) -> None:
    """Final and paid follow from what is open."""
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
        raise NotFound(f"There is no invoice {invoice_id!r}.", next_step="tollhouse invoice list")
    return invoice
