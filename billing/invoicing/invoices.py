"""Invoices: draft -> final -> paid, void or uncollectible.

A draft is recomputed from rated usage each time. Final invoices have gapless numbers and never
change; the period is closed and the postings are made in the same transaction.
"""

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingPeriod
from billing.invoicing import child_invoices
from billing.invoicing.invoice_builder import InvoiceBuilder, InvoiceDraft, open_builder
from billing.invoicing.invoice_postings import post_invoices
from billing.invoicing.tables import DRAFT, FINAL, PAID, UNCOLLECTIBLE, VOID, Invoice, InvoiceLine
from billing.notices import webhooks
from billing.periods import local_day
from billing.taxes.tax_rates import RateTable
from billing.taxes.taxes import TaxService
from core.clock import Clock
from core.errors import Conflict, NotFound
from core.money import format_minor

__all__ = ["DRAFT", "FINAL", "PAID", "UNCOLLECTIBLE", "VOID", "draft", "finalise", "get"]


def draft(
    session: Session, clock: Clock, period_id: str, taxes: TaxService | None = None
) -> Invoice | None:
    """The period's invoice as of now, None if it would be empty. A final invoice is unchanged."""
    builder = _builder(session, clock, period_id, taxes)
    return next(iter(draft_all(builder, builder.periods)), None)


def finalise(
    session: Session, clock: Clock, period_id: str, taxes: TaxService | None = None
) -> Invoice | None:
    """Close the period and finalize its invoice; None if it would be empty. Raises Conflict if
    the period cannot be closed yet.
    """
    builder = _builder(session, clock, period_id, taxes)
    return next(iter(finalise_all(builder, builder.periods)), None)


def draft_all(builder: InvoiceBuilder, periods: list[BillingPeriod]) -> list[Invoice]:
    found, drafts = [], []
    for period in periods:
        invoice = builder.inputs.invoices.get(period.id)
        if invoice is not None and invoice.status != DRAFT:
            found.append(invoice)
            continue
        draft = builder.draft(period, closing=False)
        if draft is not None:
            drafts.append(draft)
            found.append(draft.invoice)
    builder.write(drafts)
    return found


def finalise_all(builder: InvoiceBuilder, periods: list[BillingPeriod]) -> list[Invoice]:
    """At most one period per tenant, because an invoice may return credit that the next one uses.
    Conflict closes none of them.
    """
    found: list[Invoice] = []
    drafts: list[InvoiceDraft] = []
    builder.revive_credit([period for period in periods if period.closed_at is None])
    for period in periods:
        if period.closed_at is not None:
            found += (
                [builder.inputs.invoices[period.id]] if period.id in builder.inputs.invoices else []
            )
            continue
        _refuse_early(builder, period)
        draft = builder.draft(period, closing=True)
        period.closed_at = builder.now
        if draft is not None:
            drafts.append(draft)
            found.append(draft.invoice)
    builder.write(drafts)
    post_invoices(builder.session, drafts, builder.now)
    builder.number(drafts)
    for each in drafts:
        child_invoices.mark_billed(builder.session, each.invoice, each.computed_lines)
    webhooks.notify(
        builder.session,
        [
            _final_event(each.invoice)
            for each in drafts
            if builder.issued_before(each.invoice) is None
        ],
        builder.now,
    )
    return found


def _final_event(invoice: Invoice) -> webhooks.Notification:
    payload = {
        "invoice_id": invoice.id,
        "invoice": invoice.label,
        "total": format_minor(invoice.total_minor, invoice.currency),
        "due": format_minor(invoice.due_minor, invoice.currency),
        "currency": invoice.currency,
        "due_by": local_day(invoice.due_at, invoice.timezone) if invoice.due_at else "",
    }
    subject = f"Invoice {invoice.label} is final"
    return webhooks.Notification(invoice.tenant_id, "invoice.final", subject, invoice.id, payload)


def _refuse_early(builder: InvoiceBuilder, period: BillingPeriod) -> None:
    if builder.now < period.ends_at:
        raise Conflict(
            f"The period ends at {period.ends_at:%Y-%m-%d %H:%M} UTC and cannot be closed before.",
            next_step="Finalise it after that; a draft shows the amounts so far.",
        )
    if period.id in builder.organisations.waiting:
        raise Conflict(
            "Invoices of child organisations for the same time are not final yet.",
            next_step="Run the invoices of the children first.",
        )
    if period.id in builder.inputs.unrated:
        raise Conflict(
            f"Some usage of period {period.id} is not rated yet.",
            next_step="Run the rating task, then finalise the invoice.",
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


def _builder(
    session: Session, clock: Clock, period_id: str, taxes: TaxService | None
) -> InvoiceBuilder:
    builder = open_builder(session, [period_id], clock.now(), taxes or RateTable(session))
    if not builder.periods:
        raise NotFound(f"There is no billing period {period_id!r}.")
    return builder
