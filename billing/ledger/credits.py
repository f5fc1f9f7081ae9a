"""Prepaid and promotional credit: grants, and draws by priority and expiry.

The remaining credit of a tenant's grants of a kind equals the balance of that kind's ledger account.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, func, insert, select
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_account
from billing.ledger.ledger import AccountKind, Entry, Transaction, post, reverse, transfer
from billing.ledger.tables import CreditGrant, CreditUse, LedgerTransaction
from core.errors import BadRequest, Conflict
from core.ids import new_id
from core.money import Money, decimal_of

PREPAID, PROMO = AccountKind.PREPAID.value, AccountKind.PROMO.value
# Stems of the references of promotional credit that returns: what an invoice did not need, and what
# paid a fee that a later invoice returns.
SURPLUS_PROMO, FEE_PROMO = f"surplus:{PROMO}:", "promo-back:"
UNDO = "undo"  # the purpose of a use that takes a grant back


@dataclass(frozen=True, slots=True)
class Draw:
    grant_id: str
    kind: str  # prepaid | promo
    units: int


@dataclass(frozen=True, slots=True)
class Return:
    """Why used credit returns to the wallet, and the account that pays for it."""

    reference: str
    at: datetime
    note: str
    funded_by: AccountKind


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


def take_back(session: Session, grant_id: str, at: datetime, note: str) -> CreditGrant:
    """Reverse a grant of which nothing is used; Conflict for any other."""
    row = session.get_one(CreditGrant, grant_id)
    lock_account(session, row.tenant_id)
    session.refresh(row)
    if row.remaining != row.granted:
        used = decimal_of(row.granted - row.remaining)
        raise Conflict(
            f"{used} {row.currency} of this credit are used, expired or taken back.",
            next_step="A grant can be undone while all of it is left.",
        )
    original = select(LedgerTransaction.id).where(
        LedgerTransaction.reference == f"grant:{row.reference}"
    )
    reversed_by = reverse(session, session.scalars(original).one(), at, note)
    row.remaining = 0
    session.flush()
    draws = [Draw(row.id, row.kind, row.granted)]
    uses = uses_of(
        draws,
        tenant_id=row.tenant_id,
        purpose=UNDO,
        bill_period_id=None,
        transaction_id=reversed_by,
        at=at,
    )
    insert_uses(session, uses)
    return row


def open_grants(
    session: Session, tenant_ids: Iterable[str], at: datetime
) -> dict[str, list[CreditGrant]]:
    """Grants that pay for usage at this time, by tenant, in order of use: priority, expiry, promo
    before prepaid, age.
    """
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


def draw_in_time(grants: list[CreditGrant], usage: Iterable[tuple[datetime, int]]) -> list[Draw]:
    """Draw for amounts with the times at which they were used. A grant pays for what was used before
    its expiry, the earliest first.
    """
    left: list[Any] = [[at, units] for at, units in sorted(usage)]
    owed = sum(units for _, units in left)
    taken = []
    for each in grants:
        covers = [item for item in left if each.expires_at is None or item[0] < each.expires_at]
        part = min(owed, each.remaining, sum(units for _, units in covers))
        if part <= 0:
            continue
        each.remaining -= part
        owed -= part
        taken.append(Draw(each.id, each.kind, part))
        for item in covers:
            used = min(part, max(0, item[1]))
            item[1] -= used
            part -= used
    return taken


def give_back(
    session: Session,
    used: Iterable[Draw],
    cause: Return,
    most: int | None = None,
) -> int:
    """Return used credit as new grants with the kind, priority and expiry of those it came from, at
    most `most` picounits; what was used last returns first. Returns the picounits given back.
    """
    found = 0
    for number, each in enumerate(reversed(list(used))):
        units = each.units if most is None else min(each.units, most - found)
        if units <= 0:
            continue
        origin = session.get_one(CreditGrant, each.grant_id)
        grant(
            session,
            tenant_id=origin.tenant_id,
            kind=origin.kind,
            money=Money(units, origin.currency),
            reference=f"{cause.reference}:{number}",
            at=cause.at,
            priority=origin.priority,
            expires_at=origin.expires_at,
            note=cause.note,
            funded_by=cause.funded_by,
        )
        found += units
    return found


def uses_in(session: Session, *where: ColumnElement[bool]) -> list[Draw]:
    """Uses of credit by grant, in the order of their first use."""
    rows = session.execute(
        select(CreditUse.grant_id, CreditUse.kind, func.sum(CreditUse.units))
        .where(*where)
        .group_by(CreditUse.grant_id, CreditUse.kind)
        .order_by(func.min(CreditUse.id))
    )
    return [Draw(grant_id, kind, int(units)) for grant_id, kind, units in rows]


def less_returned(session: Session, used: Iterable[Draw], invoice_id: str) -> list[Draw]:
    """The uses of an invoice without those that it has given back; what was used last returned first."""
    found: list[Draw] = []
    left: dict[str, int] = {}
    for kind in (PREPAID, PROMO):
        of_kind = CreditGrant.reference.startswith(f"surplus:{kind}:{invoice_id}:")
        if kind == PROMO:
            of_kind |= CreditGrant.reference.startswith(f"{FEE_PROMO}{invoice_id}:")
        given = session.scalar(select(func.sum(CreditGrant.granted)).where(of_kind))
        left[kind] = int(given or 0)
    for each in reversed(list(used)):
        gone = min(left[each.kind], each.units)
        left[each.kind] -= gone
        if each.units > gone:
            found.append(Draw(each.grant_id, each.kind, each.units - gone))
    return found[::-1]


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
