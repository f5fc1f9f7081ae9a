"""Fees that were billed ahead and return: what is not paid of the invoice that billed them is lowered
first, so that no credit arises from what was never paid.
"""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.invoicing import open_amounts
from billing.invoicing.promoted_fees import of_line
from billing.invoicing.tables import DRAFT, FINAL, UNCOLLECTIBLE, VOID, Invoice, InvoiceLine
from billing.ledger import credits
from billing.ledger.ledger import Transaction, post
from billing.ledger.tables import CreditGrant
from core.errors import Conflict
from core.money import format_minor, round_to_minor, units_of_minor

PURPOSE = "invoice"  # of credit that lowers another invoice
_FEES = ("base_fee", "seats", "add_on")


def lower_unpaid(
    session: Session, returning: Invoice, grant: CreditGrant, sources: Sequence[str], at: datetime
) -> None:
    """Use the credit of an invoice that returned fees for what is unpaid of those that billed them. One
    at a payment provider is collected there, and keeps its amount."""
    for invoice_id in sources:
        source = open_amounts.locked_invoice(session, invoice_id)
        if source.external_id is None and source.status == FINAL:
            _lower(session, source, returning, grant, at)


def lower_before_write_off(session: Session, source: Invoice, at: datetime) -> None:
    """What is left of the credit of fees that this invoice billed lowers it first."""
    for _, returning in _returns(session, source):
        reference = f"surplus:{returning.id}"
        grant = session.scalar(select(CreditGrant).where(CreditGrant.reference == reference))
        if grant is not None:
            _lower(session, source, returning, grant, at)


def returned_minor(session: Session, source: Invoice) -> int:
    """Net minor units of its fees that later invoices have returned, not as promotional credit."""
    units = sum(
        part[1] - of_line(line).get(source.id, 0)
        for line, _ in _returns(session, source)
        for part in line.details["returned"]
        if part[0] == source.id
    )
    return round_to_minor(units, source.currency)[0]


def refuse_void(session: Session, invoice: Invoice) -> None:
    """Conflict if later invoices have returned its fees: a void would return them once more."""
    for line, by in _returns(session, invoice):
        units = sum(part[1] for part in line.details["returned"] if part[0] == invoice.id)
        if units:
            amount = format_minor(round_to_minor(units, invoice.currency)[0], invoice.currency)
            raise Conflict(
                f"{amount} {invoice.currency} of fees of invoice {invoice.label} have been returned by "
                f"invoice {by.label}; it cannot be voided.",
                next_step="Issue a credit note over the rest, or write off what is unpaid.",
            )


def _returns(session: Session, source: Invoice) -> list[tuple[InvoiceLine, Invoice]]:
    rows = session.execute(
        select(InvoiceLine, Invoice)
        .join(Invoice, Invoice.id == InvoiceLine.invoice_id)
        .where(
            Invoice.tenant_id == source.tenant_id,
            Invoice.period_end > source.period_end,
            Invoice.status.not_in((DRAFT, VOID)),
            InvoiceLine.kind.in_(_FEES),
            InvoiceLine.exact < 0,
        )
        .order_by(InvoiceLine.id)
    )
    return [
        (line, invoice)
        for line, invoice in rows
        if any(part[0] == source.id for part in line.details.get("returned", ()))
    ]


def _lower(
    session: Session, source: Invoice, returning: Invoice, grant: CreditGrant, at: datetime
) -> None:
    unit = units_of_minor(1, source.currency)
    part = min(open_amounts.open_minor(source), grant.remaining // unit)
    if part <= 0 or source.status == UNCOLLECTIBLE:
        return
    draws = credits.draw([grant], part * unit, (credits.PREPAID,))
    reference = f"returned:{returning.id}:{source.id}"
    memo = f"fees that invoice {source.label} billed and that are not used"
    entries = tuple(credits.draw_entries(draws, source.currency))
    transaction = Transaction(source.tenant_id, "credit", reference, at, entries, memo)
    transaction_id = post(session, transaction)
    uses = credits.uses_of(
        draws,
        tenant_id=source.tenant_id,
        purpose=PURPOSE,
        bill_period_id=None,
        transaction_id=transaction_id,
        at=at,
    )
    credits.insert_uses(session, uses)
    source.credited_minor += part
    open_amounts.settle(source, at)
    session.flush()
