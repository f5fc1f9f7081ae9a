"""The FOCUS 1.2 export (FinOps Open Cost and Usage Specification): one row per invoice line, day and
key. The BilledCost of the rows of an InvoiceId sums exactly to that invoice's total: a line's rounded
amount is split over its days in proportion to their exact amounts, by the largest remainder method
(`core.money.split`).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.tables import Seller
from billing.exports.focus_columns import NAMES
from billing.exports.formats import Row
from billing.exports.list_prices import ListPrices
from billing.exports.subjects import Period
from billing.invoicing.tables import CreditNote, Invoice, InvoiceLine
from billing.pricing.prices import load_price_book
from billing.usage.daily_sums import SUMS
from billing.usage.tables import DailyUsage
from core.money import split, units_of_minor
from core.tenants.models import Project, Tenant
from core.tenants.scope import TenantScope

_SLOT = {component.value: index for index, (component, _, _) in enumerate(SUMS)}
_DAY = timedelta(days=1)
# ChargeCategory and ChargeFrequency by kind of invoice line.
_CATEGORIES = {
    "usage": ("Usage", "Usage-Based"),
    "late_usage": ("Usage", "Usage-Based"),
    "adjustment": ("Adjustment", "One-Time"),
    "base_fee": ("Purchase", "Recurring"),
    "seats": ("Purchase", "Recurring"),
    "add_on": ("Purchase", "Recurring"),
    "commitment": ("Purchase", "One-Time"),
    "included": ("Credit", "Recurring"),
    "promo": ("Credit", "One-Time"),
    "credit_note": ("Adjustment", "One-Time"),
    "tax": ("Tax", "One-Time"),
    "markup": ("Purchase", "Recurring"),
    "transfer": ("Adjustment", "Recurring"),
    "child": ("Purchase", "Recurring"),
    "child_markup": ("Adjustment", "Recurring"),
    "metered": ("Adjustment", "Usage-Based"),
    "rounding": ("Adjustment", "One-Time"),
}
# Kinds of lines that correct an earlier, closed period.
_CORRECTIONS = frozenset({"late_usage", "adjustment", "credit_note"})

INVOICES_AT_ONCE = 50
_INDEX_OF = {name: index for index, name in enumerate(NAMES)}
_SHARED = (
    "BilledCost",
    "ChargePeriodStart",
    "ChargePeriodEnd",
    "ConsumedQuantity",
    "ContractedCost",
    "ContractedUnitPrice",
    "EffectiveCost",
    "ListCost",
    "ListUnitPrice",
    "PricingCurrencyContractedUnitPrice",
    "PricingCurrencyEffectiveCost",
    "PricingCurrencyListUnitPrice",
    "PricingQuantity",
    "x_KeyId",
)
_SHARE_INDEXES = tuple(
    _INDEX_OF[name] for name in _SHARED
)  # columns that differ between the shares of a line


@dataclass(frozen=True, slots=True)
class _Share:
    """Part of a line: the usage of one key on one day, or the whole line."""

    start: datetime
    end: datetime
    key_id: str | None
    quantity: int | None
    billed: int  # picounits of the rounded amount
    exact: int  # picounits


# Key of a line's daily usage: bill period, usage period, project, model, adapter, price, kind.
_Key = tuple[str, str, str, str, str, str, str]
_Day = tuple[datetime, str, list[int]]  # day, key id, and quantity and amount of each component


@dataclass(frozen=True, slots=True)
class _InvoiceData:
    """Data for the rows of several invoices, read with a fixed number of queries."""

    sellers: dict[str, str]
    tenants: dict[str, str]
    projects: dict[str, str]
    lines: dict[str, list[InvoiceLine]]
    notes: dict[str, list[CreditNote]]
    days: dict[_Key, list[_Day]]
    list_prices: ListPrices


def focus_rows(session: Session, scope: TenantScope | None, period: Period) -> Iterator[Row]:
    """Rows of every invoice whose period overlaps the range. A draft's InvoiceId is provisional."""
    query = select(Invoice.id).where(
        Invoice.period_end > period.start,
        Invoice.period_start < period.end,
        Invoice.status != "void",
    )
    if scope is not None:
        query = query.where(Invoice.tenant_id == scope.tenant_id)
    ids = session.scalars(query.order_by(Invoice.period_start, Invoice.id)).all()
    list_prices = ListPrices(load_price_book(session))
    for first in range(0, len(ids), INVOICES_AT_ONCE):
        some = ids[first : first + INVOICES_AT_ONCE]
        chosen = select(Invoice).where(Invoice.id.in_(some))
        invoices = session.scalars(chosen.order_by(Invoice.period_start, Invoice.id)).all()
        data = _load(session, invoices, list_prices)
        for invoice in invoices:
            yield from _invoice_rows(data, invoice)
            yield from _credit_note_rows(data, invoice)
        session.expunge_all()  # so that memory use is bounded by one batch


def _invoice_rows(data: _InvoiceData, invoice: Invoice) -> Iterator[Row]:
    for line in data.lines.get(invoice.id, ()):
        yield from _rows(data, invoice, line, _shares(data, invoice, line))
    if invoice.promo_minor:
        line, share = _synthetic_line(invoice, "promo", "Promotional credit", -invoice.promo_minor)
        yield from _rows(data, invoice, line, [share])


def _credit_note_rows(data: _InvoiceData, invoice: Invoice) -> Iterator[Row]:
    for note in data.notes.get(invoice.id, ()):
        for kind, minor in (("credit_note", note.net_minor), ("tax", note.tax_minor)):
            if minor:
                line, share = _synthetic_line(invoice, kind, f"Credit note: {note.reason}", -minor)
                yield from _rows(data, invoice, line, [share], note.label, invoice.label)


def _shares(data: _InvoiceData, invoice: Invoice, line: InvoiceLine) -> list[_Share]:
    whole = units_of_minor(line.amount_minor, invoice.currency)
    if line.kind not in ("usage", "late_usage"):
        quantity = line.quantity or None
        return [_Share(line.starts_at, line.ends_at, None, quantity, whole, line.exact)]
    at = 2 * _SLOT[line.component]
    key = (
        invoice.period_id,
        line.usage_period_id,
        line.project_id,
        line.model,
        line.adapter,
        line.price_version,
        str(line.details.get("kind")),
    )
    days = [
        (day, key_id, sums[at], sums[at + 1])
        for day, key_id, sums in data.days.get(key, ())
        if sums[at] > 0 or sums[at + 1] != 0
    ]
    exact = [day[3] for day in days]
    billed = _split(whole, exact, [day[2] for day in days])
    return [
        _Share(day, day + _DAY, key_id, quantity, part, own)
        for (day, key_id, quantity, own), part in zip(days, billed, strict=True)
    ]


def _split(whole: int, exact: list[int], quantities: list[int]) -> list[int]:
    """Split a rounded amount over days in proportion to their exact amounts. A day's amount may be
    negative: usage that reaches a cheaper volume tier lowers the price of the days before. Then each
    day has its exact amount, and the rounding difference is split by quantity.
    """
    if not exact:
        return []
    by_quantity = quantities if sum(quantities) > 0 else [1] * len(exact)
    if min(exact) >= 0:
        return split(whole, exact if sum(exact) > 0 else by_quantity)
    rounding = split(whole - sum(exact), by_quantity)
    return [units + part for units, part in zip(exact, rounding, strict=True)]


def _synthetic_line(
    invoice: Invoice, kind: str, text: str, minor: int
) -> tuple[InvoiceLine, _Share]:
    """A line and share for an amount that has no invoice line."""
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


def _rows(
    data: _InvoiceData,
    invoice: Invoice,
    line: InvoiceLine,
    shares: list[_Share],
    document: str | None = None,
    corrects: str | None = None,
) -> Iterator[Row]:
    """One row per share, from a template of the columns that they have in common."""
    category, frequency = _CATEGORIES[line.kind]
    metered = category == "Usage"
    taxed = category == "Tax"
    unit = line.unit or None
    counted = unit if not taxed and any(share.quantity is not None for share in shares) else None
    seller = data.sellers.get(invoice.seller_id, invoice.seller_id)
    common: dict[str, Any] = {
        "BillingAccountId": invoice.tenant_id,
        "BillingAccountName": data.tenants.get(invoice.tenant_id, invoice.tenant_id),
        "BillingAccountType": "Organization",
        "BillingCurrency": invoice.currency,
        "BillingPeriodStart": invoice.period_start,
        "BillingPeriodEnd": invoice.period_end,
        "ChargeCategory": category,
        "ChargeClass": "Correction" if _is_correction(invoice, line) or corrects else None,
        "ChargeDescription": line.description,
        "ChargeFrequency": frequency,
        "ConsumedUnit": unit if metered else None,
        "InvoiceId": document or invoice.label or invoice.id,
        "InvoiceIssuerName": seller,
        "PricingCategory": "Standard" if metered else None,
        "PricingCurrency": invoice.currency,
        "PricingUnit": counted,
        "ProviderName": seller,
        "PublisherName": seller,
        "ResourceId": line.adapter or None,
        "ResourceName": line.adapter or None,
        "ResourceType": "LoRA adapter" if line.adapter else None,
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Tollhouse inference",
        "ServiceSubcategory": "Generative AI",
        "SkuId": f"{line.model}/{line.component}" if line.model else None,
        "SkuMeter": line.component or None,
        "SkuPriceId": _price_id(line),
        "SubAccountId": line.project_id or None,
        "SubAccountName": data.projects.get(line.project_id, line.project_id) or None,
        "SubAccountType": "Project" if line.project_id else None,
        "Tags": "{}",
        "x_InvoiceStatus": invoice.status,
        "x_LineKind": line.kind,
        "x_LinePosition": line.position,
        "x_CorrectsInvoiceId": corrects,
    }
    template = [common.get(name) for name in NAMES]
    for share in shares:
        quantity, exact = None if taxed else share.quantity, share.exact
        price = exact // quantity if metered and quantity and exact % quantity == 0 else None
        list_price, list_cost = price, exact
        if metered and quantity:
            list_price, list_cost = data.list_prices.price(line, share.start, quantity, exact)
        differs = (
            share.billed,
            share.start,
            share.end,
            quantity if metered else None,
            exact,
            price,
            exact,
            list_cost,
            list_price,
            price,  # prices are in the currency of the bill
            exact,
            list_price,
            quantity,
            share.key_id,
        )
        row = template.copy()
        for place, value in zip(_SHARE_INDEXES, differs, strict=True):
            row[place] = value
        yield row


def _is_correction(invoice: Invoice, line: InvoiceLine) -> bool:
    """Also what a correction moves of an earlier period's included usage or shortfall."""
    moved = line.kind in ("included", "commitment") and line.ends_at <= invoice.period_start
    return line.kind in _CORRECTIONS or moved


def _price_id(line: InvoiceLine) -> str | None:
    """A version prices several components, which are SKUs of their own."""
    if not line.price_version or not line.model:
        return None
    return f"{line.price_version}/{line.model}/{line.component}"


def _load(session: Session, invoices: Sequence[Invoice], list_prices: ListPrices) -> _InvoiceData:
    ids = [invoice.id for invoice in invoices]
    tenants = {invoice.tenant_id for invoice in invoices}
    sellers = select(Seller).where(Seller.id.in_({invoice.seller_id for invoice in invoices}))
    owners = select(Tenant).where(Tenant.id.in_(tenants))
    projects = select(Project.id, Project.name).where(Project.tenant_id.in_(tenants))
    data = _InvoiceData(
        {row.id: row.name for row in session.scalars(sellers)},
        {row.id: row.display_name for row in session.scalars(owners)},
        {row[0]: row[1] for row in session.execute(projects)},
        defaultdict(list),
        defaultdict(list),
        _days(session, [invoice.period_id for invoice in invoices]),
        list_prices,
    )
    line, note = InvoiceLine, CreditNote
    lines = select(line).where(line.invoice_id.in_(ids)).order_by(line.invoice_id, line.position)
    for each in session.scalars(lines):
        data.lines[each.invoice_id].append(each)
    notes = select(note).where(note.invoice_id.in_(ids)).order_by(note.invoice_id, note.number)
    for found in session.scalars(notes):
        data.notes[found.invoice_id].append(found)
    return data


def _days(session: Session, period_ids: Sequence[str]) -> dict[_Key, list[_Day]]:
    use = DailyUsage
    key = (
        use.bill_period_id,
        use.usage_period_id,
        use.project_id,
        use.model,
        use.adapter,
        use.price_version,
        use.kind,
    )
    sums = [column for _, count, amount in SUMS for column in (count, amount)]
    rows = session.execute(
        select(*key, use.at, use.key_id, *sums)
        .where(use.bill_period_id.in_(period_ids))
        .order_by(use.at, use.key_id)
    )
    found: dict[_Key, list[_Day]] = defaultdict(list)
    for row in rows:
        found[row[:7]].append((row[7], row[8], list(row[9:])))
    return found
