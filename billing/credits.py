"""Prepaid and promotional credit: grants, draws by priority and expiry, and expiration.

The remaining credit of a tenant's grants of a kind equals the balance of that kind's ledger account.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from billing.accounts import lock_account
from billing.ledger import AccountKind, Entry, Transaction, post, transfer
from billing.models import CreditGrant, CreditUse
from core.errors import BadRequest
from core.ids import new_id
from core.money import Money

PREPAID, PROMO = AccountKind.PREPAID.value, AccountKind.PROMO.value


@dataclass(frozen=True, slots=True)
class Draw:
    grant_id: str
    kind: str  # prepaid | promo
    units: int


def grant(
    session: Session,
    *,
    tenant_id: str,
    kind: str,
    money: Money,
    reference: str,
    at: datetime,
    priority: int = 100,
    expires_at: datetime | None = None,
    note: str = "",
    funded_by: AccountKind | None = None,
) -> CreditGrant:
    """Add credit once per reference. Cash funds prepaid credit and promotion cost funds promo
    credit, unless `funded_by` names another account.
    """
    if kind not in (PREPAID, PROMO) or money.units <= 0:
        raise BadRequest(
            f"Credit of kind {kind!r} over {money.units} units cannot be granted.",
            next_step="Use kind prepaid or promo and an amount above zero.",
            param="amount",
        )
    account = lock_account(session, tenant_id)
    if account.currency != money.currency:
        raise BadRequest(
            f"The account is in {account.currency}, the credit in {money.currency}.",
            next_step=f"Grant it in {account.currency}.",
            code="currency_mismatch",
        )
    known = session.scalar(select(CreditGrant).where(CreditGrant.reference == reference))
    if known is not None:
        return known
    paid_by = funded_by or (AccountKind.CASH if kind == PREPAID else AccountKind.PROMOTION)
    entries = transfer(paid_by, AccountKind(kind), money)
    post(session, Transaction(tenant_id, "grant", f"grant:{reference}", at, entries, note))
    created = CreditGrant(
        id=new_id("cg"),
        tenant_id=tenant_id,
        kind=kind,
        currency=money.currency,
        granted=money.units,
        remaining=money.units,
        priority=priority,
        granted_at=at,
        expires_at=expires_at,
        reference=reference,
        note=note,
    )
    session.add(created)
    session.flush()
    return created


def open_grants(
    session: Session, tenant_ids: Iterable[str], at: datetime
) -> dict[str, list[CreditGrant]]:
    """By tenant, in order of use: priority, expiry, promo before prepaid, age."""
    rows = session.scalars(
        select(CreditGrant)
        .where(CreditGrant.tenant_id.in_(set(tenant_ids)), CreditGrant.remaining > 0)
        .execution_options(populate_existing=True)
    )
    found: dict[str, list[CreditGrant]] = {}
    for row in rows:
        if row.expires_at is None or row.expires_at > at:
            found.setdefault(row.tenant_id, []).append(row)
    for grants in found.values():
        grants.sort(key=_order_of_use)
    return found


def draw(
    grants: list[CreditGrant], units: int, kinds: tuple[str, ...] = (PREPAID, PROMO)
) -> list[Draw]:
    """Draw up to `units` from the grants; the result may be less."""
    taken = []
    for each in grants:
        part = min(units, each.remaining) if each.kind in kinds else 0
        if part > 0:
            each.remaining -= part
            units -= part
            taken.append(Draw(each.id, each.kind, part))
    return taken


def draw_whole(grants: list[CreditGrant], units: int, kind: str) -> list[Draw]:
    """Draw exactly `units` from grants of this kind, or nothing."""
    if sum(each.remaining for each in grants if each.kind == kind) < units:
        return []
    return draw(grants, units, (kind,))


def draw_entries(draws: Iterable[Draw], currency: str) -> list[Entry]:
    """Ledger entries that pay the receivable from the wallets."""
    entries: list[Entry] = []
    for each in draws:
        money = Money(each.units, currency)
        entries += transfer(AccountKind(each.kind), AccountKind.RECEIVABLE, money)
    return entries


def uses_of(
    draws: Iterable[Draw],
    *,
    tenant_id: str,
    purpose: str,
    bill_period_id: str | None,
    transaction_id: str,
    at: datetime,
) -> list[dict[str, object]]:
    """Rows for `insert_uses`."""
    return [
        {
            "grant_id": each.grant_id,
            "tenant_id": tenant_id,
            "kind": each.kind,
            "purpose": purpose,
            "units": each.units,
            "bill_period_id": bill_period_id,
            "transaction_id": transaction_id,
            "at": at,
        }
        for each in draws
    ]


def insert_uses(session: Session, uses: list[dict[str, object]]) -> None:
    """Insert the rows in one statement."""
    if uses:
        session.execute(insert(CreditUse), uses)


def expire(session: Session, now: datetime) -> int:
    """Expire grants: promo credit reverses its cost, prepaid credit becomes revenue."""
    due = session.execute(
        select(CreditGrant.tenant_id, CreditGrant.id)
        .where(
            CreditGrant.expires_at <= now,
            CreditGrant.expired_at.is_(None),
            CreditGrant.remaining > 0,
        )
        .order_by(CreditGrant.tenant_id, CreditGrant.id)
    ).all()
    for tenant_id, grant_id in due:
        lock_account(session, tenant_id)
        each = session.get(CreditGrant, grant_id, populate_existing=True)
        if each is None or each.remaining == 0 or each.expired_at is not None:
            continue
        left = each.remaining
        returns_to = AccountKind.PROMOTION if each.kind == PROMO else AccountKind.REVENUE
        entries = transfer(AccountKind(each.kind), returns_to, Money(left, each.currency))
        created = post(session, Transaction(tenant_id, "expiry", f"expiry:{each.id}", now, entries))
        session.execute(
            update(CreditGrant)
            .where(CreditGrant.id == each.id)
            .values(remaining=CreditGrant.remaining - left, expired_at=now)
        )
        uses = uses_of(
            [Draw(each.id, each.kind, left)],
            tenant_id=tenant_id,
            purpose="expiry",
            bill_period_id=None,
            transaction_id=created,
            at=now,
        )
        insert_uses(session, uses)
    return len(due)


def _order_of_use(each: CreditGrant) -> tuple[int, bool, float, bool, datetime, str]:
    expires = each.expires_at.timestamp() if each.expires_at else 0.0
    return (
        each.priority,
        each.expires_at is None,
        expires,
        each.kind != PROMO,
        each.granted_at,
        each.id,
    )
