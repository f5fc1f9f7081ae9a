"""The charges of a document in one model, from which every version of FOCUS is written.

A line of an invoice is one or several charges, one for each SKU price, and a charge has a share for
each day and key. The shares of a line sum exactly to its rounded amount: it is split over them in
proportion to their exact amounts, by the largest remainder method (`core.money.split`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from billing.exports.focus import commitments, rerated, skus
from billing.exports.focus.documents import Bounds, Document, Kind
from billing.exports.focus.inputs import SLOT, DayKey, Inputs
from billing.exports.focus.pieces import OnePrice, Piece, pieces_of
from billing.exports.focus.skus import Sku
from billing.invoicing.tables import InvoiceLine
from billing.pricing.pricing import Component
from core.money import PICO, split, units_of_minor

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
_FEES = {"base_fee": ("base-fee", "base_fee"), "seats": ("seats", "seat_fee")}
_AMOUNTS = {
    "child": ("organisation/charges", "Charges of a Child Organisation"),
    "markup": ("organisation/markup", "Mark-up"),
}


@dataclass(frozen=True, slots=True)
class Share:
    """What one key used on one day, or a whole line. Quantities are in 10^-12, money in picounits."""

    starts_at: datetime
    ends_at: datetime
    key_id: str | None
    consumed: int | None
    quantity: int | None
    prices: skus.UnitPrices | None
    billed: int
    exact: int
    labels: str = ""

    @property
    def contracted(self) -> int:
        known = self.prices is not None and self.quantity is not None
        return self.prices.cost(self.quantity or 0) if known and self.prices else self.billed

    @property
    def listed(self) -> int:
        known = self.prices is not None and self.quantity is not None
        return self.prices.list_cost(self.quantity or 0) if known and self.prices else self.billed


@dataclass(frozen=True, slots=True)
class Charge:
    """`detail_id` is the line in Invoice Detail."""

    document: Document
    line: InvoiceLine
    detail_id: str
    category: str
    frequency: str
    corrects: bool  # a billing period that was closed before
    sku: Sku | None
    price_version: str
    contract_applied: str | None
    resource: tuple[str, str, str] | None  # id, name and type
    shares: Sequence[Share]


@dataclass(frozen=True, slots=True)
class DetailLine:
    """A line of Invoice Detail: its share is the whole line."""

    document: Document
    line: InvoiceLine
    detail_id: str
    category: str
    sku_id: str | None
    billed: int


def lines_of(inputs: Inputs, document: Document) -> Iterator[tuple[InvoiceLine, str]]:
    """The lines with their ids in Invoice Detail, which are unique over all documents."""
    for line, name in _named_lines(inputs, document):
        yield line, f"{document.number}/{name}"


def _named_lines(inputs: Inputs, document: Document) -> Iterator[tuple[InvoiceLine, str]]:
    """Also those that are amounts of a document."""
    invoice, note = document.invoice, document.note
    if document.kind is Kind.CREDIT_NOTE and note is not None:
        text = f"Credit note: {note.reason}"
        for kind, detail_id, minor in (
            ("credit_note", "net", note.net_minor),
            ("tax", "tax", note.tax_minor),
        ):
            if minor:
                yield _line(document, kind, text, -minor), detail_id
        return
    for line in inputs.lines.get(invoice.id, ()):
        yield line, f"line-{line.position}"
    if invoice.promo_minor:
        yield _line(document, "promo", "Promotional credit", -invoice.promo_minor), "promo"


def charges_of(inputs: Inputs, document: Document) -> Iterator[Charge]:
    for line, detail_id in lines_of(inputs, document):
        yield from _charges(inputs, document, line, detail_id)


def details_of(inputs: Inputs, document: Document) -> Iterator[DetailLine]:
    for line, detail_id in lines_of(inputs, document):
        again = rerated.is_shown(inputs, line, document.invoice.period_id)
        category = "Usage" if again else _CATEGORIES[line.kind][0]
        billed = document.sign * units_of_minor(line.amount_minor, document.invoice.currency)
        yield DetailLine(
            document, line, detail_id, category, _sku_id(inputs, document, line), billed
        )


def _sku_id(inputs: Inputs, document: Document, line: InvoiceLine) -> str | None:
    if line.model and line.component:
        return f"{line.model}/{line.component}"
    whole = _whole(inputs, document, line)
    return whole.sku.id if whole.sku is not None else None


def _charges(
    inputs: Inputs, document: Document, line: InvoiceLine, detail_id: str
) -> Iterator[Charge]:
    category, frequency = _CATEGORIES[line.kind]
    pieces = _pieces(inputs, document, line)
    if line.kind == "adjustment" and pieces[0].sku is not None:
        category, frequency = "Usage", "Usage-Based"
    whole = units_of_minor(line.amount_minor, document.invoice.currency)
    billed = split_billed(whole, [each.exact for each in pieces], [each.weight for each in pieces])
    groups: dict[tuple[str, str], tuple[Sku | None, list[Share]]] = {}
    for piece, part in zip(pieces, billed, strict=True):
        group = (piece.sku.price_id if piece.sku is not None else "", piece.version)
        known = groups.get(group)
        if known is None:
            known = groups[group] = piece.sku, []
        known[1].append(_share(document, piece, part))
    applied, resource = None, _adapter(line)
    if line.kind == "commitment":
        held = inputs.commitments.get(document.invoice.tenant_id, ())
        applied, commitment = commitments.applied(held, _bounds(line), document.sign * whole)
        resource = (commitment, commitment, "Contract commitment") if commitment else None
    for (_, version), (sku, shares) in groups.items():
        yield Charge(
            document,
            line,
            detail_id,
            category,
            frequency,
            _is_correction(document, line),
            sku,
            version,
            applied,
            resource,
            shares,
        )


def _share(document: Document, piece: Piece, billed: int) -> Share:
    """A void has the opposite of each share of its invoice."""
    sign = document.sign
    consumed = None if piece.consumed is None else sign * piece.consumed
    quantity = None if piece.quantity is None else sign * piece.quantity
    days = piece.starts_at, piece.ends_at
    money = sign * billed, sign * piece.exact
    return Share(*days, piece.key_id, consumed, quantity, piece.prices, *money, piece.labels)


def _pieces(inputs: Inputs, document: Document, line: InvoiceLine) -> list[Piece]:
    found: list[Piece] = []
    if line.kind in ("usage", "late_usage"):
        found = _usage(inputs, document, line)
    elif line.kind == "adjustment":
        found = rerated.pieces(inputs, line, document.invoice.period_id)
    return found or [_whole(inputs, document, line)]


def _usage(inputs: Inputs, document: Document, line: InvoiceLine) -> list[Piece]:
    key: DayKey = (
        document.invoice.period_id,
        line.usage_period_id,
        line.project_id,
        line.model,
        line.adapter,
        line.price_version,
        str(line.details.get("kind")),
    )
    at = SLOT[line.component]
    component = Component(line.component)
    version = inputs.book.by_id.get(line.price_version)
    found: list[Piece] = []
    one = None
    if version is not None and component in version.linear:
        one = OnePrice(inputs.listed, (line.model, line.adapter, component), version)
    for day in inputs.days.get(key, ()):
        quantity, amount = day.sums[at], day.sums[at + 1]
        if quantity <= 0 and not amount:
            continue
        if one is not None:
            found.append(one.piece(day.at, day.key_id, (quantity, amount), day.labels))
            continue
        before = inputs.before(key, component, day)
        plain = Piece(day.at, day.at + _DAY, day.key_id, version=line.price_version, exact=amount)
        plain = replace(plain, labels=day.labels)
        what = (line.model, line.adapter, component)
        found += pieces_of(inputs.listed, what, version, plain, (before, quantity))
    return found


def _whole(inputs: Inputs, document: Document, line: InvoiceLine) -> Piece:
    """A line that no day or key is known of."""
    currency = document.invoice.currency
    billed = units_of_minor(line.amount_minor, currency)
    plain = Piece(line.starts_at, line.ends_at, None, exact=billed)
    if line.kind in ("usage", "late_usage"):
        component = Component(line.component)
        version = inputs.book.by_id.get(line.price_version)
        plain = replace(plain, exact=line.exact, version=line.price_version)
        what = (line.model, line.adapter, component)
        return pieces_of(inputs.listed, what, version, plain, (0, line.quantity))[0]
    fee = _fee(inputs, line)
    if fee is not None:
        sku, prices = fee
        quantity = (2 * line.exact * PICO + prices.contracted) // (2 * prices.contracted)
        return replace(plain, exact=line.exact, sku=sku, prices=prices, quantity=quantity)
    amount = _AMOUNTS.get(line.kind)
    if line.kind == "commitment":
        held = inputs.commitments.get(document.invoice.tenant_id, ())
        named = [each.plan.name for each in held if each.overlap(_bounds(line))]
        plan = named[-1] if named else "none"
        amount = f"plan/{plan}/commitment-shortfall", "Commitment Shortfall"
    elif line.kind in _FEES or line.kind == "add_on":
        amount = f"{line.kind}/change", "Change of a Fee"
    if amount is None:
        return plain
    one = skus.UnitPrices(PICO, PICO)
    return replace(plain, sku=skus.of_amount(*amount, currency), prices=one, quantity=billed)


def _fee(inputs: Inputs, line: InvoiceLine) -> tuple[Sku, skus.UnitPrices] | None:
    """The SKU and the prices of a plan or an add-on; None without a price, when a fee returns."""
    if line.kind == "add_on":
        add_on = inputs.add_ons.get(str(line.details.get("add_on")))
        if add_on is None or add_on.fee <= 0:
            return None
        return skus.of_add_on(add_on), skus.UnitPrices(add_on.fee, add_on.fee)
    plan = inputs.plans.get(str(line.details.get("plan")))
    if line.kind not in _FEES or plan is None:
        return None
    what, column = _FEES[line.kind]
    listed = int(getattr(plan, column))
    subscription = inputs.subscriptions.get(int(line.details.get("subscription") or 0))
    agreed = int(subscription.overrides.get(column, listed)) if subscription else listed
    if agreed <= 0:
        return None
    return skus.of_plan(plan, what), skus.UnitPrices(listed, agreed)


def _adapter(line: InvoiceLine) -> tuple[str, str, str] | None:
    return (line.adapter, line.adapter, "LoRA adapter") if line.adapter else None


def _is_correction(document: Document, line: InvoiceLine) -> bool:
    """Whether it corrects a period that was closed: what comes late, what a re-rating or another
    document changes, and what that moves of an earlier period's included usage or shortfall."""
    if document.kind is not Kind.INVOICE:
        return True
    if line.kind in ("late_usage", "adjustment"):
        return line.usage_period_id != document.invoice.period_id
    return line.kind in ("included", "commitment") and line.ends_at <= document.bounds.starts_at


def _bounds(line: InvoiceLine) -> Bounds:
    return Bounds(line.starts_at, line.ends_at)


def _line(document: Document, kind: str, text: str, minor: int) -> InvoiceLine:
    """A line for an amount that has no invoice line."""
    invoice = document.invoice
    return InvoiceLine(
        position=0,
        kind=kind,
        description=text,
        component="",
        project_id="",
        model="",
        adapter="",
        price_version="",
        usage_period_id="",
        quantity=0,
        unit="",
        exact=units_of_minor(minor, invoice.currency),
        amount_minor=minor,
        starts_at=invoice.period_start,
        ends_at=invoice.period_end,
        details={},
    )


def split_billed(whole: int, exact: list[int], weights: list[int]) -> list[int]:
    """Split a rounded amount in proportion to exact amounts. A part may be below zero: usage that
    reaches a cheaper volume tier lowers the price of the days before. Then each part has its exact
    amount, and the rounding difference is split by quantity.
    """
    if not exact:
        return []
    by_quantity = weights if sum(weights) > 0 else [1] * len(exact)
    if whole >= 0 and min(exact) >= 0:
        return split(whole, exact if sum(exact) > 0 else by_quantity)
    rest = whole - sum(exact)
    rounding = split(abs(rest), by_quantity)
    return [
        units + (part if rest >= 0 else -part) for units, part in zip(exact, rounding, strict=True)
    ]
