"""Organisations above organisations: resellers with their customers, companies with departments.

A tenant may have one parent, which may have one itself. The parent sees the usage of all tenants below
it; none of them sees its parent or a sibling. Per child, either the parent pays, and the child's charges
are on the parent's invoice, or the child does. A mark-up is the parent's, and the child bears it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from billing.accounts import DEFAULT_SELLER_ID, ensure_account
from billing.models import (
    BillingAccount,
    ChildInvoice,
    Invoice,
    OrganisationLink,
    Seller,
)
from core.clock import Clock
from core.errors import BadRequest, Conflict, NotFound
from core.money import decimal_of
from core.tenants.models import Tenant

PARENT, SELF = "parent", "self"
PAYS = (PARENT, SELF)
MOST_PERCENT = 1000
MOST_LEVELS = 8


@dataclass(frozen=True, slots=True)
class LinkDraft:
    """Tenants by id. `markup_percent` is a decimal with at most four places."""

    child_id: str
    parent_id: str
    pays: str = SELF
    markup_percent: str = "0"
    changed_by: str = ""


def set_parent(session: Session, clock: Clock, draft: LinkDraft) -> OrganisationLink:
    """Put a tenant below another, or change who pays and the mark-up. It holds for invoices that become
    final from now on."""
    now, markup = clock.now(), _ppm(draft.markup_percent)
    if draft.pays not in PAYS:
        raise BadRequest(
            f"pays is {draft.pays[:20]!r}.", next_step=f"Use {' or '.join(PAYS)}.", param="pays"
        )
    child = ensure_account(session, draft.child_id, now)
    parent = ensure_account(session, draft.parent_id, now)
    # Changes of links come one after the other, so that two of them cannot close a circle.
    session.execute(select(Seller.id).where(Seller.id == DEFAULT_SELLER_ID).with_for_update())
    links = all_links(session)
    _check_place(links, draft)
    _check_billing(child, parent, draft, markup)
    _forget_drafts(session, draft.child_id)
    link = links.get(draft.child_id)
    if link is None:
        link = OrganisationLink(tenant_id=draft.child_id, parent_id="", since=now)
        session.add(link)
    if link.parent_id != draft.parent_id:
        link.parent_id, link.since = draft.parent_id, now
    link.pays, link.markup_ppm, link.changed_by = draft.pays, markup, draft.changed_by
    session.flush()
    return link


def remove_parent(session: Session, child_id: str) -> OrganisationLink:
    """What the child's final invoices have passed on stays with the parent."""
    link = session.get(OrganisationLink, child_id)
    if link is None:
        raise NotFound("The tenant has no parent.", next_step="There is nothing to remove.")
    _forget_drafts(session, child_id)
    session.delete(link)
    session.flush()
    return link


def _forget_drafts(session: Session, child_id: str) -> None:
    """What drafts pass on is written again with the next draft."""
    drafts = select(Invoice.id).where(Invoice.tenant_id == child_id, Invoice.number.is_(None))
    session.execute(delete(ChildInvoice).where(ChildInvoice.invoice_id.in_(drafts)))


def _ppm(written: str) -> int:
    try:
        scaled = Decimal(written).scaleb(4)
    except InvalidOperation:
        scaled = Decimal("NaN")
    exact = scaled.is_finite() and scaled == scaled.to_integral_value()
    if not exact or not 0 <= scaled <= MOST_PERCENT * 10**4:
        raise BadRequest(
            f"The mark-up {written[:20]!r} is not a percentage.",
            next_step=f"Use a decimal from 0 to {MOST_PERCENT} with at most four places.",
            param="markup_percent",
        )
    return int(scaled)


def _check_place(links: dict[str, OrganisationLink], draft: LinkDraft) -> None:
    above, at = [draft.parent_id], links.get(draft.parent_id)
    while at is not None and at.parent_id not in above:
        above.append(at.parent_id)
        at = links.get(at.parent_id)
    if draft.child_id in above:
        raise Conflict(
            "An organisation cannot be below itself: the parent is the tenant, or below it.",
            next_step="Choose another parent, or remove the parent's own first.",
            param="parent",
        )
    below = 1 + max((len(path) for path in paths_below(links, draft.child_id).values()), default=0)
    if len(above) + below > MOST_LEVELS:
        raise Conflict(
            f"There would be more than {MOST_LEVELS} levels of organisations.",
            next_step="Put the tenant below an organisation further up.",
            param="parent",
        )


def _check_billing(
    child: BillingAccount, parent: BillingAccount, draft: LinkDraft, markup_ppm: int
) -> None:
    passes_on = draft.pays == PARENT or markup_ppm
    if passes_on and child.currency != parent.currency:
        raise Conflict(
            f"The child is billed in {child.currency}, the parent in {parent.currency}.",
            next_step="Let the child pay itself, without a mark-up, or bill both in one currency.",
            param="pays",
        )
    if passes_on and "stripe_meters" in (child.collection, parent.collection):
        raise Conflict(
            "Usage that Stripe prices by meters cannot be passed on.",
            next_step="Change collection to manual or stripe first.",
            param="pays",
        )


def all_links(session: Session) -> dict[str, OrganisationLink]:
    return {link.tenant_id: link for link in session.scalars(select(OrganisationLink))}


def paths_below(
    links: dict[str, OrganisationLink], parent_id: str
) -> dict[str, tuple[OrganisationLink, ...]]:
    """Each tenant below, nearest first, with the links that lead down to it."""
    children: dict[str, list[OrganisationLink]] = {}
    for link in links.values():
        children.setdefault(link.parent_id, []).append(link)
    found: dict[str, tuple[OrganisationLink, ...]] = {}
    level: list[tuple[OrganisationLink, ...]] = [(link,) for link in children.get(parent_id, ())]
    while level:
        for path in level:
            found[path[-1].tenant_id] = path
        level = [(*path, link) for path in level for link in children.get(path[-1].tenant_id, ())]
    return found


def by_depth(session: Session, tenant_ids: Sequence[str]) -> list[list[str]]:
    """The tenants in groups, those furthest below first: children are billed before their parents."""
    links, groups = all_links(session), dict[int, list[str]]()
    for tenant_id in tenant_ids:
        depth, at = 0, links.get(tenant_id)
        while at is not None:
            depth, at = depth + 1, links.get(at.parent_id)
        groups.setdefault(depth, []).append(tenant_id)
    return [groups[depth] for depth in sorted(groups, reverse=True)]


def parents_since(session: Session, tenant_ids: Sequence[str]) -> dict[str, datetime]:
    """Since when each of the tenants is a parent, if it is one."""
    query = select(OrganisationLink.parent_id, func.min(OrganisationLink.since)).where(
        OrganisationLink.parent_id.in_(tenant_ids)
    )
    return dict(session.execute(query.group_by(OrganisationLink.parent_id)).all())


def names_of(session: Session, ids: Sequence[str]) -> dict[str, str]:
    return dict(session.execute(select(Tenant.id, Tenant.name).where(Tenant.id.in_(ids))).all())


def percent(ppm: int) -> str:
    """`125000` -> `12.5`."""
    return decimal_of(ppm * 10**8)


def describe(session: Session, link: OrganisationLink) -> dict[str, Any]:
    names = names_of(session, [link.tenant_id, link.parent_id])
    return {
        "tenant": names.get(link.tenant_id, link.tenant_id),
        "parent": names.get(link.parent_id, link.parent_id),
        "pays": link.pays,
        "markup_percent": percent(link.markup_ppm),
        "since": link.since.isoformat(),
    }
