"""Changes of who stands below whom: a tenant's parent, who pays, and the mark-up."""

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from billing.accounts.accounts import DEFAULT_SELLER_ID, ensure_account
from billing.accounts.tables import BillingAccount, Seller
from billing.invoicing.tables import ChildInvoice, Invoice
from billing.organisations.organisations import PARENT, PAYS, SELF, all_links, paths_below
from billing.organisations.tables import OrganisationLink
from core.clock import Clock
from core.errors import BadRequest, Conflict, NotFound

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
