"""Invoices: draft -> final -> paid, void or uncollectible. Drawing one up again changes nothing.

A draft is made anew each time from what is rated. Final ones have a number without gaps and never
change; closing the period and the postings are in the same transaction.
"""

from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, exists, func, insert, select
from sqlalchemy.orm import Session

from billing import credits, lines, subscriptions
from billing.accounts import lock_account
from billing.closing import close_books
from billing.models import (
    BillingAccount,
    BillingPeriod,
    CreditUse,
    Invoice,
    InvoiceLine,
    Seller,
    UsageBatch,
    UsageEventRow,
)
from billing.taxes import ConfiguredTaxes, Tax, TaxService
from billing.totals import Totals, net_of, totals_of
from core.clock import Clock
from core.errors import Conflict, NotFound
from core.ids import INVOICE, new_id
from core.money import units_of_minor

DRAFT, FINAL, PAID, VOID, UNCOLLECTIBLE = "draft", "final", "paid", "void", "uncollectible"
GRACE_HOURS = 24  # without a plan
TERMS_DAYS = 14


def draft(
    session: Session, clock: Clock, period_id: str, taxes: TaxService | None = None
) -> Invoice | None:
    """The period's invoice as of now; a final one is left as it is; None if there is nothing in it."""
    period = _period(session, period_id)
    account = lock_account(session, period.tenant_id)
    invoice = session.scalar(select(Invoice).where(Invoice.period_id == period_id))
    if invoice is not None and invoice.status != DRAFT:
        return invoice
    built = lines.build(session, period, account.currency)
    if not built and invoice is None:
        return None
    if invoice is None:
        invoice = _new(session, account, period, clock.now())
    promo, prepaid = used_credit(session, period_id)
    net = net_of(built, promo, account.currency)
    at = min(clock.now(), period.ends_at)
    taxed = (taxes or ConfiguredTaxes()).taxes(session, account, net.taxable_minor, at)
    _write(session, invoice, built, taxed, totals_of(net, taxed, prepaid))
    return invoice


def finalise(
    session: Session, clock: Clock, period_id: str, taxes: TaxService | None = None
) -> Invoice | None:
    """Close the period and make its invoice final. None if nothing is in it. Conflict if it cannot
    be closed yet.
    """
    period = _period(session, period_id)
    account = lock_account(session, period.tenant_id)
    session.refresh(period)
    if period.closed_at is not None:
        return session.scalar(select(Invoice).where(Invoice.period_id == period_id))
    now = clock.now()
    if now < period.ends_at:
        raise Conflict(
            f"The period ends only at {period.ends_at:%Y-%m-%d %H:%M} UTC.",
            next_step="Make it final then; a draft shows the amounts so far.",
        )
    if unrated(session, period):
        raise Conflict(
            "Usage of the period is not rated yet.",
            next_step="Run the rating task, then make the invoice final.",
        )
    invoice = session.scalar(select(Invoice).where(Invoice.period_id == period_id))
    built = lines.build(session, period, account.currency)
    period.closed_at = now
    if invoice is None and not built:
        session.flush()
        return None
    if invoice is None:
        invoice = _new(session, account, period, now)
    promo, prepaid = used_credit(session, period_id)
    owed = sum(line.exact for line in built) - promo - prepaid
    grants = credits.open_grants(session, [account.tenant_id], now).get(account.tenant_id, [])
    draws = credits.draw(grants, max(0, owed))
    promo += sum(each.units for each in draws if each.kind == credits.PROMO)
    prepaid += sum(each.units for each in draws if each.kind == credits.PREPAID)
    net = net_of(built, promo, account.currency)
    taxed = (taxes or ConfiguredTaxes()).taxes(
        session, account, net.taxable_minor, min(now, period.ends_at)
    )
    tax_minor = sum(tax.amount_minor for tax in taxed)
    tax_draws = credits.draw(
        grants, units_of_minor(tax_minor, account.currency), (credits.PREPAID,)
    )
    covered = sum(each.units for each in tax_draws)
    if covered != units_of_minor(tax_minor, account.currency):  # whole or not at all
        for each in tax_draws:
            next(g for g in grants if g.id == each.grant_id).remaining += each.units
        tax_draws = []
    totals = totals_of(net, taxed, prepaid, tax_minor if tax_draws else 0)
    _write(session, invoice, built, taxed, totals)
    close_books(session, invoice, built, totals, draws + tax_draws, now)
    _number(session, account, invoice, now)
    return invoice


def used_credit(session: Session, period_id: str) -> tuple[int, int]:
    """Picounits of promotional and of prepaid credit that usage of the period has used."""
    rows = session.execute(
        select(CreditUse.kind, func.sum(CreditUse.units))
        .where(CreditUse.bill_period_id == period_id, CreditUse.purpose == "usage")
        .group_by(CreditUse.kind)
    )
    used = {row[0]: int(row[1]) for row in rows}
    return used.get(credits.PROMO, 0), used.get(credits.PREPAID, 0)


def unrated(session: Session, period: BillingPeriod) -> bool:
    """Whether usage of the period waits to be rated."""
    waiting = (
        select(UsageEventRow.request_id)
        .join(UsageBatch, UsageBatch.id == UsageEventRow.batch_id)
        .where(
            UsageBatch.rated_at.is_(None),
            UsageEventRow.tenant_id == period.tenant_id,
            UsageEventRow.occurred_at >= period.starts_at,
            UsageEventRow.occurred_at < period.ends_at,
        )
    )
    return bool(session.scalar(select(exists(waiting))))


def final_from(session: Session, period: BillingPeriod) -> datetime:
    """When late events have had their time and the invoice may become final."""
    plan = subscriptions.plan_at(
        session, period.tenant_id, period.ends_at - timedelta(microseconds=1)
    )
    return period.ends_at + timedelta(hours=plan.grace_hours if plan else GRACE_HOURS)


def lines_of(session: Session, invoice_id: str) -> list[InvoiceLine]:
    return list(
        session.scalars(
            select(InvoiceLine)
            .where(InvoiceLine.invoice_id == invoice_id)
            .order_by(InvoiceLine.position)
        )
    )


def get(session: Session, reference: str) -> Invoice:
    """By id or by its printed number."""
    found = session.get(Invoice, reference) or session.scalar(
        select(Invoice).where(Invoice.label == reference)
    )
    if found is None:
        raise NotFound(f"There is no invoice {reference!r}.", next_step="tollhouse invoice list")
    return found


def _period(session: Session, period_id: str) -> BillingPeriod:
    period = session.get(BillingPeriod, period_id)
    if period is None:
        raise NotFound(f"There is no billing period {period_id!r}.")
    return period


def _new(
    session: Session, account: BillingAccount, period: BillingPeriod, now: datetime
) -> Invoice:
    invoice = Invoice(
        id=new_id(INVOICE),
        tenant_id=account.tenant_id,
        seller_id=account.seller_id,
        period_id=period.id,
        status=DRAFT,
        currency=account.currency,
        period_start=period.starts_at,
        period_end=period.ends_at,
        timezone=account.timezone,
        drafted_at=now,
    )
    session.add(invoice)
    session.flush()
    return invoice


def _write(
    session: Session,
    invoice: Invoice,
    built: list[lines.Line],
    taxed: list[Tax],
    totals: Totals,
) -> None:
    """Put the figures and lines on a draft, in place of those that were there."""
    session.execute(delete(InvoiceLine).where(InvoiceLine.invoice_id == invoice.id))
    rows = [_row(line) for line in built] + [_tax_row(invoice, tax) for tax in taxed]
    for position, row in enumerate(rows, 1):
        row["invoice_id"], row["position"] = invoice.id, position
    if rows:
        session.execute(insert(InvoiceLine), rows)
    invoice.exact = totals.net.exact
    invoice.subtotal_minor = totals.net.subtotal_minor
    invoice.promo_minor = totals.net.promo_minor
    invoice.tax_minor = totals.tax_minor
    invoice.total_minor = totals.total_minor
    invoice.prepaid_minor = totals.prepaid_minor
    invoice.due_minor = totals.due_minor
    session.flush()


def _row(line: lines.Line) -> dict[str, Any]:
    row = asdict(line)
    row["amount_minor"] = row.pop("minor")
    return row


def _tax_row(invoice: Invoice, tax: Tax) -> dict[str, Any]:
    line = lines.Line(
        "tax",
        tax.name,
        units_of_minor(tax.amount_minor, invoice.currency),
        tax.amount_minor,
        invoice.period_start,
        invoice.period_end,
        details={"rate_ppm": tax.rate_ppm},
    )
    return _row(line)


def _number(session: Session, account: BillingAccount, invoice: Invoice, now: datetime) -> None:
    """The next number of the seller, whose row stays locked until this commits: no gap, no twin."""
    seller = session.scalar(
        select(Seller)
        .where(Seller.id == invoice.seller_id)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    assert seller is not None
    plan = subscriptions.plan_at(
        session, invoice.tenant_id, invoice.period_end - timedelta(microseconds=1)
    )
    terms = plan.payment_terms_days if plan else TERMS_DAYS
    invoice.number = seller.next_number
    invoice.label = f"{seller.number_prefix}-{seller.next_number:06d}"
    seller.next_number += 1
    invoice.billed_to = {
        "name": account.legal_name,
        "address": account.address,
        "email": account.email,
        "tax_id": account.tax_id,
        "tax_region": account.tax_region,
        "tax_exempt": account.tax_exempt,
    }
    invoice.final_at, invoice.due_at = now, now + timedelta(days=terms)
    invoice.status = FINAL
    if invoice.due_minor == 0:
        invoice.status, invoice.settled_at = PAID, now
    session.flush()
