"""The lines by which charges pass between the invoices of children and of their parents.

A child's invoice has its charges and its mark-up. If its parent pays, a line `transfer` takes all that
is owed away, so that its revenue moves: the parent's invoice has the charges as a line `child`. The
mark-up is between the two. If the child pays itself, its mark-up returns to the parent by a line
`child_markup`, less than zero. Sums over both are the charges, to the minor unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from billing.invoice_lines import Line
from billing.invoice_totals import Net
from billing.models import BillingPeriod, ChildInvoice, Invoice, OrganisationLink
from billing.organisations import PARENT, percent
from core.errors import Conflict
from core.money import round_half_away, round_to_minor, units_of_minor
from core.tenants.models import Tenant

MARKUP, TRANSFER, CHILD, CHILD_MARKUP = "markup", "transfer", "child", "child_markup"
_PPM = 10**6


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
    waiting = session.execute(
        select(ChildInvoice, Tenant.name)
        .outerjoin(Tenant, Tenant.id == ChildInvoice.child_id)
        .where(ChildInvoice.parent_id.in_(tenants), ChildInvoice.billed_by.is_(None))
        .order_by(ChildInvoice.period_start, Tenant.name, ChildInvoice.invoice_id)
    ).all()
    found: dict[str, list[Line]] = {}
    for period in sorted(periods, key=lambda each: each.starts_at):
        mine = [pair for pair in waiting if pair[0].parent_id == period.tenant_id]
        found[period.id] = [
            line
            for child, name in mine
            if child.period_end <= period.ends_at
            for line in _passed(child, name or child.child_id, currencies[period.tenant_id])
        ]
        billed = [pair for pair in mine if pair[0].period_end <= period.ends_at]
        waiting = [pair for pair in waiting if pair not in billed]
    return found


def _passed(child: ChildInvoice, name: str, currency: str) -> list[Line]:
    span = f"{child.period_start:%Y-%m-%d} to {child.period_end:%Y-%m-%d}"
    if child.pays == PARENT:
        kind, minor, text = CHILD, child.charged_minor, f"{name}, charges of {span}"
    else:
        kind, minor, text = CHILD_MARKUP, -child.markup_minor, f"{name}, mark-up of {span}"
    exact = units_of_minor(minor, currency)
    details = {"child": child.child_id, "child_name": name, "invoice": child.invoice_id}
    bounds = (child.period_start, child.period_end)
    return [Line(kind, text, exact, minor, *bounds, details=details)] if minor else []


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
    markup = sum(line.minor for line in lines if line.kind == MARKUP)
    moved = -sum(line.minor for line in lines if line.kind == TRANSFER)
    passed = moved - markup if link.pays == PARENT else 0
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
        )
    )


def mark_billed(session: Session, invoice: Invoice, lines: Sequence[Line]) -> None:
    """After the parent's invoice with these lines has become final."""
    ids = [line.details["invoice"] for line in lines if line.kind in (CHILD, CHILD_MARKUP)]
    if not ids:
        return
    chosen = update(ChildInvoice).where(ChildInvoice.invoice_id.in_(ids))
    marked = session.execute(chosen.values(billed_by=invoice.id))
    if marked.rowcount != len(ids):  # type: ignore[attr-defined]
        raise Conflict(
            "An invoice of a child organisation has become void meanwhile.",
            next_step="Run the invoices again.",
        )


def release(session: Session, invoice: Invoice) -> None:
    """Before an invoice becomes void: Conflict if its parent's invoice has what it passed on."""
    passed = session.get(ChildInvoice, invoice.id, with_for_update=True)
    if passed is None:
        return
    if passed.billed_by is not None:
        raise Conflict(
            f"What invoice {invoice.label} passed on is on an invoice of the parent organisation.",
            next_step="Issue a credit note for the parent's invoice.",
        )
    session.delete(passed)


def _line(kind: str, text: str, exact: int, period: BillingPeriod, currency: str) -> Line:
    minor = round_to_minor(exact, currency)[0]
    return Line(kind, text, exact, minor, period.starts_at, period.ends_at)
