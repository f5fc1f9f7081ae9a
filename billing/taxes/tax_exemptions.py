"""Exemption certificates of tenants: recorded, ended, never deleted."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.taxes.tables import TaxExemption
from billing.taxes.taxes import Certificate
from core.errors import BadRequest, NotFound
from core.ids import new_id


def record(
    session: Session,
    *,
    tenant_id: str,
    number: str,
    region: str,
    valid_from: datetime,
    valid_to: datetime | None,
    recorded_by: str,
    at: datetime,
) -> TaxExemption:
    if valid_to is not None and valid_to <= valid_from:
        raise BadRequest(
            f"valid_to is {valid_to:%Y-%m-%d}, which is not after valid_from.", param="valid_to"
        )
    created = TaxExemption(
        id=new_id("txe"),
        tenant_id=tenant_id,
        number=number,
        region=region,
        valid_from=valid_from,
        valid_to=valid_to,
        recorded_by=recorded_by,
        recorded_at=at,
    )
    session.add(created)
    session.flush()
    return created


def end(session: Session, tenant_id: str, exemption_id: str, at: datetime) -> TaxExemption:
    """The certificate covers no supply from `at` on."""
    found = session.get(TaxExemption, exemption_id)
    if found is None or found.tenant_id != tenant_id:
        raise NotFound(f"There is no tax exemption {exemption_id!r} of this tenant.")
    found.valid_to = at if found.valid_to is None else min(at, found.valid_to)
    return found


def of_tenant(session: Session, tenant_id: str) -> list[TaxExemption]:
    query = select(TaxExemption).where(TaxExemption.tenant_id == tenant_id)
    return list(session.scalars(query.order_by(TaxExemption.valid_from, TaxExemption.id)))


def certificates(session: Session, tenant_ids: Iterable[str]) -> dict[str, tuple[Certificate, ...]]:
    """By tenant, in one query."""
    query = select(TaxExemption).where(TaxExemption.tenant_id.in_(set(tenant_ids)))
    found: dict[str, list[Certificate]] = defaultdict(list)
    for row in session.scalars(query.order_by(TaxExemption.valid_from, TaxExemption.id)):
        found[row.tenant_id].append(
            Certificate(row.number, row.region, row.valid_from, row.valid_to)
        )
    return {tenant_id: tuple(some) for tenant_id, some in found.items()}
