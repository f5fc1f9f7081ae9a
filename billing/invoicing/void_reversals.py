"""Undoing the void of an invoice, while all of the credit that it returned is left."""

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session, aliased

from billing.invoicing import open_amounts, recognition
from billing.invoicing.child_invoices import MARKUP, TRANSFER
from billing.invoicing.invoices import PAID, VOID
from billing.invoicing.tables import Invoice, InvoiceLine
from billing.ledger import credits
from billing.ledger.ledger import reverse
from billing.ledger.tables import CreditGrant, LedgerTransaction
from core.errors import Conflict


def undo_void(session: Session, invoice_id: str, at: datetime, note: str) -> Invoice:
    """Reverse the void and take its credit back. Conflict names what stands against it."""
    invoice = open_amounts.locked_invoice(session, invoice_id)
    _refuse(session, invoice)
    opposite = aliased(LedgerTransaction)
    stem = f"void:{invoice.id}"
    posted = session.scalars(
        select(LedgerTransaction)
        .outerjoin(opposite, opposite.reverses_id == LedgerTransaction.id)
        .where(
            (LedgerTransaction.reference == stem)
            | LedgerTransaction.reference.startswith(f"{stem}:"),
            opposite.id.is_(None),
        )
    ).one_or_none()
    if posted is not None:  # an invoice over nothing has no posting
        returned = select(CreditGrant.id).where(
            CreditGrant.reference.startswith(f"{posted.reference}:")
        )
        for grant_id in session.scalars(returned.order_by(CreditGrant.id)).all():
            credits.take_back(session, grant_id, at, note)
        reverse(session, posted.id, at, note)
    invoice.status, invoice.settled_at = PAID, at
    open_amounts.settle(invoice, at)
    session.flush()
    return invoice


def _refuse(session: Session, invoice: Invoice) -> None:
    if invoice.status != VOID:
        raise Conflict(
            f"Invoice {invoice.label} is {invoice.status}.",
            next_step="Only a void that is in force can be undone.",
        )
    if invoice.external_id is not None:
        raise Conflict(
            f"The payment provider has closed its copy of invoice {invoice.label}.",
            next_step="Bill the amount on the next invoice instead.",
        )
    passed = select(InvoiceLine.id).where(
        InvoiceLine.invoice_id == invoice.id, InvoiceLine.kind.in_((MARKUP, TRANSFER))
    )
    if session.scalars(passed).first() is not None:
        raise Conflict(
            f"The void took back what invoice {invoice.label} passed on to the parent organisation, "
            "whose own invoice may be final since.",
            next_step="Bill the amount on the next invoice instead.",
        )
    if any(
        each.invoice.id == invoice.id
        for each in recognition.deferred_lines(session, invoice.tenant_id)
    ):
        raise Conflict(
            f"Invoice {invoice.label} has fees that were billed ahead, and the void has made them "
            "revenue at once.",
            next_step="Bill the amount on the next invoice instead.",
        )
