"""Invoices: draft -> final -> paid, void or uncollectible.

A draft is recomputed from rated usage each time. Final invoices have gapless numbers and never
change; the period is closed and the postings are made in the same transaction.
"""

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing import webhooks
from billing.closing import close_books
from billing.desk import DRAFT, FINAL, PAID, Desk, Sheet, open_desk
from billing.models import BillingPeriod, Invoice, InvoiceLine
from billing.taxes import ConfiguredTaxes, TaxService
from core.clock import Clock
from core.errors import Conflict, NotFound
from core.money import format_minor

VOID, UNCOLLECTIBLE = "void", "uncollectible"
__all__ = ["DRAFT", "FINAL", "PAID", "UNCOLLECTIBLE", "VOID", "draft", "finalise", "get"]


def draft(
    session: Session, clock: Clock, period_id: str, taxes: TaxService | None = None
) -> Invoice | None:
    """The period's invoice as of now, None if it would be empty. A final invoice is unchanged."""
    desk = _desk(session, clock, period_id, taxes)
    return next(iter(draft_all(desk, desk.periods)), None)


def finalise(
    session: Session, clock: Clock, period_id: str, taxes: TaxService | None = None
) -> Invoice | None:
    """Close the period and finalize its invoice; None if it would be empty. Raises Conflict if
    the period cannot be closed yet.
    """
    desk = _desk(session, clock, period_id, taxes)
    return next(iter(finalise_all(desk, desk.periods)), None)


def draft_all(desk: Desk, periods: list[BillingPeriod]) -> list[Invoice]:
    found, sheets = [], []
    for period in periods:
        invoice = desk.facts.invoices.get(period.id)
        if invoice is not None and invoice.status != DRAFT:
            found.append(invoice)
            continue
        sheet = desk.sheet(period, closing=False)
        if sheet is not None:
            sheets.append(sheet)
            found.append(sheet.invoice)
    desk.write(sheets)
    return found


def finalise_all(desk: Desk, periods: list[BillingPeriod]) -> list[Invoice]:
    """At most one period per tenant, because an invoice may return credit that the next one uses.
    Conflict closes none of them.
    """
    found: list[Invoice] = []
    sheets: list[Sheet] = []
    for period in periods:
        if period.closed_at is not None:
            found += [desk.facts.invoices[period.id]] if period.id in desk.facts.invoices else []
            continue
        _refuse_early(desk, period)
        sheet = desk.sheet(period, closing=True)
        period.closed_at = desk.now
        if sheet is not None:
            sheets.append(sheet)
            found.append(sheet.invoice)
    desk.write(sheets)
    close_books(desk.session, sheets, desk.now)
    desk.number(sheets)
    webhooks.tell(desk.session, [_made(each.invoice) for each in sheets], desk.now)
    return found


def _made(invoice: Invoice) -> webhooks.Cause:
    payload = {
        "invoice_id": invoice.id,
        "invoice": invoice.label,
        "total": format_minor(invoice.total_minor, invoice.currency),
        "due": format_minor(invoice.due_minor, invoice.currency),
        "currency": invoice.currency,
        "due_by": invoice.due_at.date().isoformat() if invoice.due_at else "",
    }
    subject = f"Invoice {invoice.label} is final"
    return webhooks.Cause(invoice.tenant_id, "invoice.final", subject, invoice.id, payload)


def _refuse_early(desk: Desk, period: BillingPeriod) -> None:
    if desk.now < period.ends_at:
        raise Conflict(
            f"The period ends at {period.ends_at:%Y-%m-%d %H:%M} UTC and cannot be closed before.",
            next_step="Finalize it after that; a draft shows the amounts so far.",
        )
    if period.id in desk.facts.unrated:
        raise Conflict(
            f"Some usage of period {period.id} is not rated yet.",
            next_step="Run the rating task, then finalize the invoice.",
        )


def lines_of(session: Session, invoice_id: str) -> list[InvoiceLine]:
    return list(
        session.scalars(
            select(InvoiceLine)
            .where(InvoiceLine.invoice_id == invoice_id)
            .order_by(InvoiceLine.position)
        )
    )


def get(session: Session, reference: str) -> Invoice:
    """Look up by id or by printed number."""
    found = session.get(Invoice, reference) or session.scalar(
        select(Invoice).where(Invoice.label == reference)
    )
    if found is None:
        raise NotFound(
            f"There is no invoice {reference!r}.",
            next_step="List invoices with: tollhouse invoice list",
        )
    return found


def _desk(session: Session, clock: Clock, period_id: str, taxes: TaxService | None) -> Desk:
    desk = open_desk(session, [period_id], clock.now(), taxes or ConfiguredTaxes())
    if not desk.periods:
        raise NotFound(f"There is no billing period {period_id!r}.")
    return desk
