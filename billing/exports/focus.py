"""The FOCUS 1.2 export (FinOps Open Cost and Usage Specification): one row a charge of an invoice,
by day and key. The BilledCost of the rows of an InvoiceId adds up to that invoice's total exactly:
a line's rounded amount is shared over its days in proportion to their exact amounts, and the last
unit is given to the largest remainder (`core.money.split`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.exports.formats import Column, Kind, Row
from billing.exports.subjects import Period
from billing.models import CreditNote, DailyUsage, Invoice, InvoiceLine, Seller
from billing.pricing import Component
from core.money import split, units_of_minor
from core.tenants.models import Project, Tenant
from core.tenants.scope import TenantScope

_COUNTS: dict[Component, tuple[Any, Any]] = {
    Component.INPUT: (DailyUsage.input_tokens - DailyUsage.cached_tokens, DailyUsage.input_amount),
    Component.CACHED_INPUT: (DailyUsage.cached_tokens, DailyUsage.cached_amount),
    Component.OUTPUT: (DailyUsage.output_tokens, DailyUsage.output_amount),
    Component.WAIVED: (DailyUsage.waived_tokens, DailyUsage.waived_amount),
    Component.REQUEST: (DailyUsage.requests, DailyUsage.request_amount),
    Component.ADAPTER: (DailyUsage.adapter_requests, DailyUsage.adapter_amount),
    Component.GPU_SECOND: (DailyUsage.gpu_seconds, DailyUsage.gpu_amount),
    Component.MODERATION: (DailyUsage.moderation_calls, DailyUsage.moderation_amount),
}
# What FOCUS calls the kinds of our lines, and how often they come.
_CATEGORIES = {
    "usage": ("Usage", "Usage-Based"),
    "late_usage": ("Usage", "Usage-Based"),
    "adjustment": ("Adjustment", "One-Time"),
    "base_fee": ("Purchase", "Recurring"),
    "seats": ("Purchase", "Recurring"),
    "commitment": ("Purchase", "One-Time"),
    "included": ("Credit", "Recurring"),
    "promo": ("Credit", "One-Time"),
    "credit_note": ("Adjustment", "One-Time"),
    "tax": ("Tax", "One-Time"),
}
# Lines that change what an earlier, closed period came to.
_CORRECTIONS = frozenset({"late_usage", "adjustment", "credit_note"})

COLUMNS = (
    Column("BilledCost", Kind.UNITS),
    Column("BillingAccountId"),
    Column("BillingAccountName"),
    Column("BillingAccountType"),
    Column("BillingCurrency"),
    Column("BillingPeriodStart", Kind.MOMENT),
    Column("BillingPeriodEnd", Kind.MOMENT),
    Column("ChargeCategory"),
    Column("ChargeClass"),
    Column("ChargeDescription"),
    Column("ChargeFrequency"),
    Column("ChargePeriodStart", Kind.MOMENT),
    Column("ChargePeriodEnd", Kind.MOMENT),
    Column("ConsumedQuantity", Kind.WHOLE),
    Column("ConsumedUnit"),
    Column("ContractedCost", Kind.UNITS),
    Column("ContractedUnitPrice", Kind.UNITS),
    Column("EffectiveCost", Kind.UNITS),
    Column("InvoiceId"),
    Column("InvoiceIssuerName"),
    Column("ListCost", Kind.UNITS),
    Column("ListUnitPrice", Kind.UNITS),
    Column("PricingCategory"),
    Column("PricingCurrency"),
    Column("PricingQuantity", Kind.WHOLE),
    Column("PricingUnit"),
    Column("ProviderName"),
    Column("PublisherName"),
    Column("ResourceId"),
    Column("ResourceName"),
    Column("ResourceType"),
    Column("ServiceCategory"),
    Column("ServiceName"),
    Column("ServiceSubcategory"),
    Column("SkuId"),
    Column("SkuMeter"),
    Column("SkuPriceId"),
    Column("SubAccountId"),
    Column("SubAccountName"),
    Column("SubAccountType"),
    Column("Tags"),
    Column("x_KeyId"),
    Column("x_InvoiceStatus"),
    Column("x_LineKind"),
    Column("x_LinePosition", Kind.WHOLE),
    Column("x_CorrectsInvoiceId"),
)
_NAMES = tuple(column.name for column in COLUMNS)


@dataclass(frozen=True, slots=True)
class _Share:
    """A part of a line: a day's use by one key, or the whole line."""

    start: datetime
    end: datetime
    key_id: str | None
    quantity: int | None
    billed: int  # picounits, of the rounded amount
    exact: int  # picounits


@dataclass(frozen=True, slots=True)
class _Frame:
    """What all rows of an invoice share."""

    invoice: Invoice
    seller: str
    tenant: str
    projects: dict[str, str]


def focus_rows(session: Session, scope: TenantScope | None, period: Period) -> Iterator[Row]:
    """Rows of every invoice whose period lies in the range. A draft's rows have no InvoiceId."""
    query = select(Invoice).where(
        Invoice.period_end > period.start,
        Invoice.period_start < period.end,
        Invoice.status != "void",
    )
    if scope is not None:
        query = query.where(Invoice.tenant_id == scope.tenant_id)
    for invoice in session.scalars(query.order_by(Invoice.period_start, Invoice.id)).all():
        frame = _frame(session, invoice)
        yield from _invoice_rows(session, frame)
        yield from _credit_note_rows(session, frame)


def _invoice_rows(session: Session, frame: _Frame) -> Iterator[Row]:
    invoice = frame.invoice
    lines = session.scalars(
        select(InvoiceLine)
        .where(InvoiceLine.invoice_id == invoice.id)
        .order_by(InvoiceLine.position)
    ).all()
    for line in lines:
        for share in _shares(session, invoice, line):
            yield _row(frame, line, share)
    if invoice.promo_minor:
        yield _row(frame, *_whole(invoice, "promo", "Promotional credit", -invoice.promo_minor))


def _credit_note_rows(session: Session, frame: _Frame) -> Iterator[Row]:
    notes = session.scalars(
        select(CreditNote)
        .where(CreditNote.invoice_id == frame.invoice.id)
        .order_by(CreditNote.number)
    ).all()
    for note in notes:
        for kind, minor in (("credit_note", note.net_minor), ("tax", note.tax_minor)):
            if minor:
                line, share = _whole(frame.invoice, kind, f"Credit note: {note.reason}", -minor)
                yield _row(frame, line, share, document=note.label, corrects=frame.invoice.label)


def _shares(session: Session, invoice: Invoice, line: InvoiceLine) -> list[_Share]:
    whole = units_of_minor(line.amount_minor, invoice.currency)
    if line.kind not in ("usage", "late_usage"):
        quantity = line.quantity or None
        return [_Share(line.starts_at, line.ends_at, None, quantity, whole, line.exact)]
    count, amount = _COUNTS[Component(line.component)]
    use = DailyUsage
    days = session.execute(
        select(use.at, use.key_id, func.sum(count), func.sum(amount))
        .where(
            use.bill_period_id == invoice.period_id,
            use.usage_period_id == line.usage_period_id,
            use.project_id == line.project_id,
            use.model == line.model,
            use.adapter == line.adapter,
            use.price_version == line.price_version,
            use.kind == line.details.get("kind"),
        )
        .group_by(use.at, use.key_id)
        .having((func.sum(count) > 0) | (func.sum(amount) != 0))
        .order_by(use.at, use.key_id)
    ).all()
    exact = [int(row[3]) for row in days]
    weights = exact if sum(exact) > 0 else [int(row[2]) for row in days]
    billed = split(whole, weights) if sum(weights) > 0 else [0] * len(days)
    return [
        _Share(row[0], row[0] + timedelta(days=1), row[1], int(row[2]), part, own)
        for row, part, own in zip(days, billed, exact, strict=True)
    ]


def _whole(invoice: Invoice, kind: str, text: str, minor: int) -> tuple[InvoiceLine, _Share]:
    """A row for what has no line of its own."""
    units = units_of_minor(minor, invoice.currency)
    line = InvoiceLine(
        position=0,
        kind=kind,
        description=text,
        component="",
        project_id="",
        model="",
        adapter="",
        price_version="",
        quantity=0,
        unit="",
    )
    return line, _Share(invoice.period_start, invoice.period_end, None, None, units, units)


def _row(
    frame: _Frame,
    line: InvoiceLine,
    share: _Share,
    document: str | None = None,
    corrects: str | None = None,
) -> Row:
    invoice = frame.invoice
    category, frequency = _CATEGORIES[line.kind]
    metered = category == "Usage"
    quantity = share.quantity if category != "Tax" else None
    unit = line.unit or None
    price = (
        share.exact // quantity if metered and quantity and share.exact % quantity == 0 else None
    )
    values: dict[str, Any] = {
        "BilledCost": share.billed,
        "BillingAccountId": invoice.tenant_id,
        "BillingAccountName": frame.tenant,
        "BillingAccountType": "Organization",
        "BillingCurrency": invoice.currency,
        "BillingPeriodStart": invoice.period_start,
        "BillingPeriodEnd": invoice.period_end,
        "ChargeCategory": category,
        "ChargeClass": "Correction" if line.kind in _CORRECTIONS or corrects else None,
        "ChargeDescription": line.description,
        "ChargeFrequency": frequency,
        "ChargePeriodStart": share.start,
        "ChargePeriodEnd": share.end,
        "ConsumedQuantity": quantity if metered else None,
        "ConsumedUnit": unit if metered else None,
        "ContractedCost": share.exact,
        "ContractedUnitPrice": price,
        "EffectiveCost": share.exact,
        "InvoiceId": document or invoice.label,
        "InvoiceIssuerName": frame.seller,
        "ListCost": share.exact,
        "ListUnitPrice": price,
        "PricingCategory": "Standard" if metered else None,
        "PricingCurrency": invoice.currency,
        "PricingQuantity": quantity,
        "PricingUnit": unit if quantity is not None else None,
        "ProviderName": frame.seller,
        "PublisherName": frame.seller,
        "ResourceId": line.adapter or None,
        "ResourceName": line.adapter or None,
        "ResourceType": "LoRA adapter" if line.adapter else None,
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Tollhouse inference",
        "ServiceSubcategory": "Generative AI",
        "SkuId": f"{line.model}/{line.component}" if line.model else None,
        "SkuMeter": line.component or None,
        "SkuPriceId": line.price_version or None,
        "SubAccountId": line.project_id or None,
        "SubAccountName": frame.projects.get(line.project_id) if line.project_id else None,
        "SubAccountType": "Project" if line.project_id else None,
        "Tags": "{}",
        "x_KeyId": share.key_id,
        "x_InvoiceStatus": invoice.status,
        "x_LineKind": line.kind,
        "x_LinePosition": line.position,
        "x_CorrectsInvoiceId": corrects,
    }
    return [values[name] for name in _NAMES]


def _frame(session: Session, invoice: Invoice) -> _Frame:
    seller = session.get(Seller, invoice.seller_id)
    tenant = session.get(Tenant, invoice.tenant_id)
    projects = session.execute(
        select(Project.id, Project.name).where(Project.tenant_id == invoice.tenant_id)
    )
    return _Frame(
        invoice,
        seller.name if seller else invoice.seller_id,
        tenant.display_name if tenant else invoice.tenant_id,
        {row[0]: row[1] for row in projects},
    )
