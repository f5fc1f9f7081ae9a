"""The lines by which charges pass between the invoices of children and of their parents.

A child's invoice has its charges and its mark-up. If its parent pays, a line `transfer` takes all that
is owed away, so that its revenue moves: the parent's invoice has the charges as a line `child`. The
mark-up is between the two. If the child pays itself, its mark-up returns to the parent by lines
`child_markup`: as much as the child has paid of it, in proportion, when the parent's invoice is made. A
refund, a dispute or a credit note that returns the child's money takes its share back on the parent's
next invoice. What the child's promotional credit paid of a mark-up is promotional credit of the parent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingPeriod
from billing.invoicing.invoice_lines import Line
from billing.invoicing.invoice_totals import Net
from billing.invoicing.tables import ChildInvoice, CreditNote, Invoice
from billing.ledger import credits
from billing.ledger.tables import CreditGrant, CreditUse
from billing.organisations.organisations import PARENT, percent
from billing.organisations.tables import OrganisationLink
from core.errors import Conflict
from core.money import Money, format_minor, round_half_away, round_to_minor, units_of_minor
from core.tenants.models import Tenant

MARKUP, TRANSFER, CHILD, CHILD_MARKUP = "markup", "transfer", "child", "child_markup"
_PPM = 10**6
_ISSUED = ("final", "paid", "uncollectible")  # statuses in which an invoice is owed


@dataclass(frozen=True, slots=True)
class Organisations:
    """What invoices need to know of the organisations above and below their tenants."""

    links: dict[str, OrganisationLink] = field(default_factory=dict)  # by the child's tenant id
    passed: dict[str, list[Line]] = field(default_factory=dict)  # by period id, from children
    waiting: set[str] = field(default_factory=set)  # ids of periods that children's must precede


def read_organisations(
    session: Session, periods: Sequence[BillingPeriod], currencies: dict[str, str]
) -> Organisations:
    tenants = {period.tenant_id for period in periods}
    above = select(OrganisationLink).where(OrganisationLink.tenant_id.in_(tenants))
    return Organisations(
        {link.tenant_id: link for link in session.scalars(above)},
        _lines_of_children(session, periods, currencies),
        _waiting_for_children(session, periods),
    )


def markup_lines(
    link: OrganisationLink | None, lines: Sequence[Line], period: BillingPeriod, currency: str
) -> list[Line]:
    """The mark-up on a child's charges, exact in picounits."""
    if link is None or not link.markup_ppm or not lines:
        return []
    exact = round_half_away(sum(line.exact for line in lines) * link.markup_ppm, _PPM)
    text = f"Mark-up {percent(link.markup_ppm)} %"
    return [_line(MARKUP, text, exact, period, currency)] if exact else []


def transfer_lines(
    link: OrganisationLink | None,
    net: Net,
    period: BillingPeriod,
) -> list[Line]:
    """What takes the rest of a child's invoice away, after its own credit, where its parent pays."""
    if link is None or link.pays != PARENT:
        return []
    owed = net.left_minor
    exact = -units_of_minor(owed, net.currency)
    line = _line(TRANSFER, "Billed to the parent organisation", exact, period, net.currency)
    return [replace(line, details={"parent": link.parent_id})] if owed else []


def _lines_of_children(
    session: Session, periods: Sequence[BillingPeriod], currencies: dict[str, str]
) -> dict[str, list[Line]]:
    """By period id: what the invoices of children pass on that no final invoice has billed yet."""
    tenants = {period.tenant_id for period in periods}
    rows = session.execute(
        select(ChildInvoice, Tenant.name, Invoice)
        .join(Invoice, Invoice.id == ChildInvoice.invoice_id)
        .outerjoin(Tenant, Tenant.id == ChildInvoice.child_id)
        .where(
            ChildInvoice.parent_id.in_(tenants),
            ChildInvoice.billed_by.is_(None) | (ChildInvoice.pays != PARENT),
        )
        .order_by(ChildInvoice.period_start, Tenant.name, ChildInvoice.invoice_id)
        .execution_options(populate_existing=True)
    ).all()
    returned = _returned(session, [row[2].id for row in rows])
    waiting = [(row[0], row[1], _earned(row[0], row[2], returned)) for row in rows]
    found: dict[str, list[Line]] = {}
    for period in sorted(periods, key=lambda each: each.starts_at):
        mine = [pair for pair in waiting if pair[0].parent_id == period.tenant_id]
        found[period.id] = [
            line
            for child, name, earned in mine
            if child.period_end <= period.ends_at
            for line in _passed(child, name or child.child_id, earned, currencies[period.tenant_id])
        ]
        billed = [pair for pair in mine if pair[0].period_end <= period.ends_at]
        waiting = [pair for pair in waiting if pair not in billed]
    return found


def _returned(session: Session, invoice_ids: Sequence[str]) -> dict[str, int]:
    """Minor units by invoice of all its credit notes."""
    rows = session.execute(
        select(CreditNote.invoice_id, func.sum(CreditNote.net_minor + CreditNote.tax_minor))
        .where(CreditNote.invoice_id.in_(invoice_ids))
        .group_by(CreditNote.invoice_id)
    )
    return {row[0]: int(row[1]) for row in rows}


def _earned(child: ChildInvoice, invoice: Invoice, noted: dict[str, int]) -> int:
    """Minor units of the mark-up that the child's money has paid and that no note or refund gave back."""
    if child.pays == PARENT or invoice.status not in _ISSUED:
        return 0
    markup = child.markup_minor - child.markup_promo_minor
    if markup <= 0 or invoice.total_minor <= 0:
        return markup
    too_much = max(0, invoice.paid_minor + invoice.credited_minor - invoice.due_minor)
    to_wallet = max(0, noted.get(invoice.id, 0) - invoice.credited_minor)
    kept = invoice.prepaid_minor + invoice.paid_minor - too_much - to_wallet
    return round_half_away(markup * min(max(0, kept), invoice.total_minor), invoice.total_minor)


def _passed(child: ChildInvoice, name: str, earned: int, currency: str) -> list[Line]:
    span = f"{child.period_start:%Y-%m-%d} to {child.period_end:%Y-%m-%d}"
    details: dict[str, Any] = {
        "child": child.child_id,
        "child_name": name,
        "invoice": child.invoice_id,
    }
    bounds = (child.period_start, child.period_end)
    found = []
    if child.pays == PARENT:
        kind, minor, text = CHILD, child.charged_minor, f"{name}, charges of {span}"
    else:
        kind, minor, text = CHILD_MARKUP, child.passed_minor - earned, f"{name}, mark-up of {span}"
        if minor > 0:
            text += ", taken back: the child's payment was"
    if minor:
        exact = units_of_minor(minor, currency)
        found.append(Line(kind, text, exact, minor, *bounds, details=details))
    gift = child.markup_promo_minor - child.promo_passed_minor
    if gift > 0:
        amount = format_minor(gift, currency)
        text = f"{name}, mark-up of {span}: {amount} {currency} as promotional credit"
        details = {**details, "promotion_minor": gift}
        found.append(Line(CHILD_MARKUP, text, 0, 0, *bounds, details=details))
    return found


def _waiting_for_children(session: Session, periods: Sequence[BillingPeriod]) -> set[str]:
    """Ids of the periods whose tenants have children with a period that ends no later and is open."""
    parents = {period.tenant_id for period in periods}
    rows = session.execute(
        select(OrganisationLink.parent_id, BillingPeriod.ends_at)
        .join(BillingPeriod, BillingPeriod.tenant_id == OrganisationLink.tenant_id)
        .where(OrganisationLink.parent_id.in_(parents), BillingPeriod.closed_at.is_(None))
    ).all()
    return {
        period.id
        for period in periods
        if any(parent == period.tenant_id and ends <= period.ends_at for parent, ends in rows)
    }


def keep(session: Session, link: OrganisationLink, invoice: Invoice, lines: list[Line]) -> None:
    """Store what a child's invoice, draft or final, passes on."""
    session.execute(delete(ChildInvoice).where(ChildInvoice.invoice_id == invoice.id))
    own = sum(line.minor for line in lines if line.kind != TRANSFER)
    markup = sum(line.minor for line in lines if line.kind == MARKUP)
    moved = -sum(line.minor for line in lines if line.kind == TRANSFER)
    promo = 0
    if markup > 0 and own > 0:
        promo = min(markup, round_half_away(markup * max(0, invoice.promo_minor), own))
    passed = moved - (markup - promo) if link.pays == PARENT else 0
    if not passed and not markup:
        return
    session.add(
        ChildInvoice(
            invoice_id=invoice.id,
            parent_id=link.parent_id,
            child_id=invoice.tenant_id,
            pays=link.pays,
            period_start=invoice.period_start,
            period_end=invoice.period_end,
            charged_minor=passed,
            markup_minor=markup,
            markup_promo_minor=promo,
            passed_minor=0,
            promo_passed_minor=0,
        )
    )


def mark_billed(session: Session, invoice: Invoice, lines: Sequence[Line]) -> None:
    """After the parent's invoice with these lines has become final."""
    _mark_markups(session, invoice, [line for line in lines if line.kind == CHILD_MARKUP])
    ids = [line.details["invoice"] for line in lines if line.kind == CHILD]
    if not ids:
        return
    chosen = update(ChildInvoice).where(ChildInvoice.invoice_id.in_(ids))
    marked = session.execute(chosen.values(billed_by=invoice.id))
    if marked.rowcount != len(ids):  # type: ignore[attr-defined]
        raise Conflict(
            "An invoice of a child organisation has become void meanwhile.",
            next_step="Run the invoices again.",
        )


def _mark_markups(session: Session, invoice: Invoice, lines: Sequence[Line]) -> None:
    for line in lines:
        passed = session.get(ChildInvoice, line.details["invoice"], with_for_update=True)
        if passed is None:
            raise Conflict(
                "An invoice of a child organisation has become void meanwhile.",
                next_step="Run the invoices again.",
            )
        passed.passed_minor -= line.minor
        gift = line.details.get("promotion_minor", 0)
        if gift:
            passed.promo_passed_minor += gift
            _pass_promotion(session, invoice, passed, gift)
    session.flush()


def _pass_promotion(session: Session, invoice: Invoice, child: ChildInvoice, gift: int) -> None:
    """As long as the child's own credit lasts. One that has ended passes nothing on."""
    at = invoice.final_at
    assert at is not None
    ends = session.scalars(
        select(CreditGrant.expires_at)
        .join(CreditUse, CreditUse.grant_id == CreditGrant.id)
        .join(Invoice, Invoice.period_id == CreditUse.bill_period_id)
        .where(Invoice.id == child.invoice_id, CreditUse.kind == credits.PROMO)
    ).all()
    last = None if None in ends or not ends else max(end for end in ends if end is not None)
    if last is not None and last <= at:
        return
    credits.grant(
        session,
        tenant_id=invoice.tenant_id,
        kind=credits.PROMO,
        money=Money(units_of_minor(gift, invoice.currency), invoice.currency),
        reference=f"child-markup:{child.invoice_id}",
        at=at,
        expires_at=last,
        note="mark-up that a child organisation paid with promotional credit",
    )


def release(session: Session, invoice: Invoice) -> None:
    """Before an invoice becomes void: Conflict if its parent's invoice has what it passed on."""
    passed = session.get(ChildInvoice, invoice.id, with_for_update=True)
    if passed is None:
        return
    if passed.billed_by is not None or passed.passed_minor or passed.promo_passed_minor:
        raise Conflict(
            f"What invoice {invoice.label} passed on is on an invoice of the parent organisation.",
            next_step="Issue a credit note for the parent's invoice.",
        )
    session.delete(passed)


def _line(kind: str, text: str, exact: int, period: BillingPeriod, currency: str) -> Line:
    minor = round_to_minor(exact, currency)[0]
    return Line(kind, text, exact, minor, period.starts_at, period.ends_at)
