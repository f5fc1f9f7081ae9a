"""What an invoice still lacks, and how a payment covers it."""

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.invoicing.tables import DRAFT, FINAL, PAID, UNCOLLECTIBLE, VOID, Invoice
from billing.ledger.ledger import AccountKind, Entry, transfer
from core.errors import NotFound
from core.money import Money, units_of_minor


def open_minor(invoice: Invoice) -> int:
    """The open amount in minor units."""
    return 0 if invoice.status == UNCOLLECTIBLE else unpaid_minor(invoice)


def cover(invoice: Invoice, minor: int, at: datetime) -> tuple[int, tuple[Entry, ...]]:
    """Pay up to `minor` units of the invoice; returns what was used and the entries to post. An
    uncollectible invoice recovers its bad debt, and is paid once all of it is recovered.
    """
    part = min(minor, max(0, unpaid_minor(invoice)))
    if part == 0:
        return 0, ()
    entries = transfer(AccountKind.CASH, _debt(invoice), _money(invoice, part))
    invoice.paid_minor += part
    settle(invoice, at)
    return part, entries


def uncover(invoice: Invoice, minor: int, at: datetime) -> tuple[Entry, ...]:
    """Take back payments of the invoice; returns the entries to post."""
    if minor == 0:
        return ()
    invoice.paid_minor -= minor
    settle(invoice, at)
    return transfer(_debt(invoice), AccountKind.CASH, _money(invoice, minor))


def settle(invoice: Invoice, at: datetime) -> None:
    """Set final or paid according to the open amount."""
    unpaid = unpaid_minor(invoice)
    if invoice.status in (FINAL, UNCOLLECTIBLE) and unpaid <= 0:
        invoice.status, invoice.settled_at = PAID, at
    elif invoice.status == PAID and unpaid > 0:
        invoice.status, invoice.settled_at = FINAL, None


def locked_invoice(session: Session, invoice_id: str) -> Invoice:
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


def unpaid_minor(invoice: Invoice) -> int:
    """What payments and credit notes leave, also of what is written off."""
    if invoice.status in (DRAFT, VOID):
        return 0
    return invoice.due_minor - invoice.paid_minor - invoice.credited_minor


def _debt(invoice: Invoice) -> AccountKind:
    written_off = invoice.status == UNCOLLECTIBLE
    return AccountKind.BAD_DEBT if written_off else AccountKind.RECEIVABLE


def _money(invoice: Invoice, minor: int) -> Money:
    return Money(units_of_minor(minor, invoice.currency), invoice.currency)
