"""Credit notes: they reverse part or all of a final invoice, which itself never changes.

A credit note includes the tax on its net amount. It first lowers the open amount; the rest goes to
the wallet, or to the payer as far as payments cover it.
"""

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_account
from billing.accounts.tables import Seller
from billing.invoicing import open_amounts, returned_fees
from billing.invoicing.invoices import FINAL, PAID
from billing.invoicing.tables import CreditNote, Invoice
from billing.ledger import credits
from billing.ledger.ledger import AccountKind, Entry, Transaction, post, reverse
from billing.ledger.tables import CreditGrant
from billing.restores import restores
from core.errors import Conflict, NotFound
from core.ids import TRANSACTION, derived_id, new_id
from core.money import Money, round_half_away, units_of_minor

DUE, BALANCE, REFUND = "due", "balance", "refund"
CANCELS = "cancels"  # a note that takes an earlier one back


def issue(
    session: Session,
    *,
    invoice_id: str,
    net_minor: int,
    reason: str,
    reference: str,
    at: datetime,
    refund: bool = False,
) -> CreditNote:
    """Issue one note per reference. With `refund` what payments brought in is left to a refund of
    those payments; what was paid from the wallet returns to it.
    """
    known = session.scalar(select(CreditNote).where(CreditNote.reference == reference))
    if known is not None:
        return known
    invoice = session.get(Invoice, invoice_id)
    if invoice is None:
        raise NotFound(
            f"There is no invoice {invoice_id!r}.",
            next_step="List invoices with: tollhouse invoice list",
        )
    lock_account(session, invoice.tenant_id)
    session.refresh(invoice, with_for_update=True)
    _refuse_too_much(session, invoice, net_minor)
    tax_minor = _tax_share(session, invoice, net_minor)
    gross = net_minor + tax_minor
    lowers, refunded, to_wallet = _shares(invoice, gross, refund)
    currency = invoice.currency
    transaction_id = new_id(TRANSACTION)
    entries = [
        Entry(AccountKind.REVENUE, Money(units_of_minor(net_minor, currency), currency)),
        Entry(AccountKind.TAX, Money(units_of_minor(tax_minor, currency), currency)),
        Entry(AccountKind.RECEIVABLE, Money(-units_of_minor(gross, currency), currency)),
    ]
    post(
        session,
        Transaction(
            invoice.tenant_id,
            "credit_note",
            f"credit-note:{reference}",
            at,
            tuple(entry for entry in entries if entry.money.units),
            reason,
            id=transaction_id,
        ),
    )
    invoice.credited_minor += lowers + refunded
    if to_wallet:
        credits.grant(
            session,
            tenant_id=invoice.tenant_id,
            kind=credits.PREPAID,
            money=Money(units_of_minor(to_wallet, currency), currency),
            reference=f"credit-note:{reference}",
            at=at,
            note=f"credit note on invoice {invoice.label}",
            funded_by=AccountKind.RECEIVABLE,
        )
    open_amounts.settle(invoice, at)
    outcome = REFUND if refunded else BALANCE if to_wallet else DUE
    return _write(
        session,
        invoice,
        net_minor=net_minor,
        tax_minor=tax_minor,
        outcome=outcome,
        reason=reason,
        reference=reference,
        at=at,
        transaction_id=transaction_id,
    )


def cancel(session: Session, note: CreditNote, reason: str, at: datetime) -> CreditNote:
    """Take a note back by a note over the same amounts below zero, with a number of its own; what it
    lowered is open again. Conflict if its credit is used, or the provider knows of it."""
    invoice = session.get_one(Invoice, note.invoice_id)
    lock_account(session, invoice.tenant_id)
    session.refresh(invoice, with_for_update=True)
    reference = f"cancel:{note.id}"
    known = session.scalar(select(CreditNote).where(CreditNote.reference == reference))
    if known is not None or note.outcome == CANCELS:
        by = f"cancelled by {known.label}" if known is not None else "a cancellation itself"
        raise Conflict(f"Credit note {note.label} is {by}.", next_step="Issue a new note instead.")
    if invoice.status not in (FINAL, PAID) or invoice.external_id is not None:
        raise Conflict(
            f"Invoice {invoice.label} is {invoice.status}"
            f"{' and at the payment provider' if invoice.external_id else ''}; its credit notes cannot "
            "be taken back.",
            next_step="Bill the amount on the next invoice instead.",
        )
    granted = session.scalar(
        select(CreditGrant).where(CreditGrant.reference == f"credit-note:{note.reference}")
    )
    to_wallet = 0
    if granted is not None:
        credits.take_back(session, granted.id, at, reason)
        to_wallet = granted.granted // units_of_minor(1, note.currency)
    transaction_id = reverse(session, note.transaction_id, at, reason)
    invoice.credited_minor -= note.net_minor + note.tax_minor - to_wallet
    open_amounts.settle(invoice, at)
    return _write(
        session,
        invoice,
        net_minor=-note.net_minor,
        tax_minor=-note.tax_minor,
        outcome=CANCELS,
        reason=f"Cancels {note.label}: {reason}",
        reference=reference,
        at=at,
        transaction_id=transaction_id,
    )


def get(session: Session, reference: str) -> CreditNote:
    """By id or number."""
    query = select(CreditNote).where((CreditNote.id == reference) | (CreditNote.label == reference))
    found = session.scalars(query).first()
    if found is None:
        raise unknown(reference)
    return found


def unknown(reference: str) -> NotFound:
    return NotFound(
        f"There is no credit note {reference[:80]!r}.",
        next_step="Take its number from the invoice that it belongs to.",
    )


def _shares(invoice: Invoice, gross: int, refund: bool) -> tuple[int, int, int]:
    """Minor units that lower the open amount, that a refund repays, and that go to the wallet."""
    unpaid = open_amounts.open_minor(invoice)
    lowers = min(gross, max(0, unpaid))
    repayable = invoice.paid_minor - max(0, -unpaid)  # less what earlier notes left to refunds
    refunded = min(gross - lowers, max(0, repayable)) if refund else 0
    return lowers, refunded, gross - lowers - refunded


def _refuse_too_much(session: Session, invoice: Invoice, net_minor: int) -> None:
    if invoice.status not in (FINAL, PAID):
        raise Conflict(
            f"Invoice {invoice.label or invoice.id} is {invoice.status}; only final and paid invoices "
            "can be credited.",
            next_step="Finalise a draft first; a void or uncollectible invoice needs no credit note.",
        )
    left = invoice.subtotal_minor - invoice.promo_minor - _noted(session, invoice)[0]
    left -= returned_fees.returned_minor(session, invoice)
    if not 0 < net_minor <= left:
        raise Conflict(
            f"net_minor is {net_minor}; invoice {invoice.label} has {left} minor units net left to "
            "credit.",
            next_step=f"Credit 1 to {left} minor units."
            if left > 0
            else "Nothing is left to credit.",
        )


def _noted(session: Session, invoice: Invoice) -> tuple[int, int]:
    """Net and tax, in minor units, of the invoice's notes so far."""
    notes = session.scalars(select(CreditNote).where(CreditNote.invoice_id == invoice.id)).all()
    return sum(note.net_minor for note in notes), sum(note.tax_minor for note in notes)


def _tax_share(session: Session, invoice: Invoice, net_minor: int) -> int:
    """Computed cumulatively, so that notes over the whole invoice reverse all of its tax."""
    net_before, tax_before = _noted(session, invoice)
    taxable = invoice.subtotal_minor - invoice.promo_minor
    reversed_tax = round_half_away(invoice.tax_minor * (net_before + net_minor), taxable)
    return reversed_tax - tax_before


def _write(
    session: Session,
    invoice: Invoice,
    *,
    net_minor: int,
    tax_minor: int,
    outcome: str,
    reason: str,
    reference: str,
    at: datetime,
    transaction_id: str,
) -> CreditNote:
    seller = session.scalar(
        select(Seller)
        .where(Seller.id == invoice.seller_id)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    assert seller is not None
    restores.require_current(session)
    note = CreditNote(
        id=derived_id("cn", invoice.id, reference, at=invoice.period_start),
        invoice_id=invoice.id,
        tenant_id=invoice.tenant_id,
        seller_id=invoice.seller_id,
        number=seller.next_credit_note,
        label=f"{seller.number_prefix}-CN-{seller.next_credit_note:06d}",
        currency=invoice.currency,
        net_minor=net_minor,
        tax_minor=tax_minor,
        outcome=outcome,
        reason=reason,
        reference=reference,
        transaction_id=transaction_id,
        issued_at=at,
    )
    seller.next_credit_note += 1
    session.add(note)
    session.flush()
    return note
