"""Organisations above organisations: resellers with their customers, companies with departments.

A tenant may have one parent, which may have one itself. The parent sees the usage of all tenants below
it; none of them sees its parent or a sibling. Per child, either the parent pays, and the child's charges
are on the parent's invoice, or the child does. A mark-up is the parent's, and the child bears it.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.organisations.tables import OrganisationLink
from core.money import decimal_of
from core.tenants.models import Tenant

PARENT, SELF = "parent", "self"
PAYS = (PARENT, SELF)


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
