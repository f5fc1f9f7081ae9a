"""Expiry of credit. Credit that was used in time pays for the usage, also if the usage is rated or
invoiced after the expiry: `revive` brings it back, and the next expiry takes what is left.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime

from sqlalchemy import ColumnElement, func, or_, select, update
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_account
from billing.ledger import credits
from billing.ledger.credits import Draw
from billing.ledger.ledger import AccountKind, Transaction, post, transfer
from billing.ledger.tables import CreditGrant, CreditUse
from core.money import Money

EXPIRY = "expiry"


def tenants_with_expired(session: Session, now: datetime) -> list[str]:
    due = select(CreditGrant.tenant_id).where(*_due(now)).distinct()
    return list(session.scalars(due.order_by(CreditGrant.tenant_id)))


def expire(session: Session, now: datetime, tenant_id: str | None = None) -> int:
    """Expire grants of one tenant, or of all: promo credit reverses its cost, prepaid credit becomes
    revenue."""
    chosen = select(CreditGrant.tenant_id, CreditGrant.id).where(*_due(now))
    if tenant_id is not None:
        chosen = chosen.where(CreditGrant.tenant_id == tenant_id)
    due = session.execute(chosen.order_by(CreditGrant.tenant_id, CreditGrant.id)).all()
    for owner, grant_id in due:
        lock_account(session, owner)
        each = session.get(CreditGrant, grant_id, populate_existing=True)
        if each is not None and each.remaining > 0 and each.expired_at is None:
            _move(session, each, each.remaining, now)
    return len(due)


def _due(now: datetime) -> tuple[ColumnElement[bool], ...]:
    return (
        CreditGrant.expires_at <= now,
        CreditGrant.expired_at.is_(None),
        CreditGrant.remaining > 0,
    )


def expired_since(
    session: Session, tenant_ids: Iterable[str], since: datetime, now: datetime
) -> dict[str, list[CreditGrant]]:
    """Grants by tenant that expired after `since` and up to now with credit left."""
    rows = session.scalars(
        select(CreditGrant)
        .where(
            CreditGrant.tenant_id.in_(set(tenant_ids)),
            CreditGrant.expires_at > since,
            CreditGrant.expires_at <= now,
            or_(CreditGrant.remaining > 0, CreditGrant.expired_at.is_not(None)),
        )
        .order_by(CreditGrant.tenant_id, CreditGrant.id)
        .execution_options(populate_existing=True)
    )
    found: dict[str, list[CreditGrant]] = {}
    for row in rows:
        found.setdefault(row.tenant_id, []).append(row)
    return found


def revive(session: Session, expired: Mapping[str, list[CreditGrant]], now: datetime) -> None:
    """Bring the expired credit of these grants back. Hold the tenants' locks."""
    for grants in expired.values():
        for each in grants:
            if each.expired_at is not None:
                _move(session, each, -_expired(session, each), now)
    session.flush()


def _move(session: Session, grant: CreditGrant, units: int, now: datetime) -> None:
    """Expire this much of the grant; a negative amount comes back."""
    returns_to = AccountKind.PROMOTION if grant.kind == credits.PROMO else AccountKind.REVENUE
    entries = transfer(AccountKind(grant.kind), returns_to, Money(units, grant.currency))
    times = session.scalar(
        select(func.count()).where(CreditUse.grant_id == grant.id, CreditUse.purpose == EXPIRY)
    )
    reference = f"expiry:{grant.id}:{times}" if times else f"expiry:{grant.id}"
    created = post(session, Transaction(grant.tenant_id, EXPIRY, reference, now, entries))
    session.execute(
        update(CreditGrant)
        .where(CreditGrant.id == grant.id)
        .values(remaining=CreditGrant.remaining - units, expired_at=now if units > 0 else None)
    )
    session.refresh(grant)
    uses = credits.uses_of(
        [Draw(grant.id, grant.kind, units)],
        tenant_id=grant.tenant_id,
        purpose=EXPIRY,
        bill_period_id=None,
        transaction_id=created,
        at=now,
    )
    credits.insert_uses(session, uses)


def _expired(session: Session, grant: CreditGrant) -> int:
    found = session.scalar(
        select(func.sum(CreditUse.units)).where(
            CreditUse.grant_id == grant.id, CreditUse.purpose == EXPIRY
        )
    )
    return int(found or 0)
