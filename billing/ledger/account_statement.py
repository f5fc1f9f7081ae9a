"""The entries of one ledger account in the order of their time, with the balance after each."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, func, select, tuple_
from sqlalchemy.orm import Session

from billing.amounts import money
from billing.ledger.ledger import AccountKind
from billing.ledger.tables import LedgerAccount, LedgerEntry, LedgerTransaction
from core.errors import BadRequest, NotFound
from core.money import MINOR_DIGITS
from core.tenants.models import Tenant

MOST = 500
_A, _E, _T = LedgerAccount, LedgerEntry, LedgerTransaction
_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class StatementQuery:
    """`tenant_id` empty: of all tenants together. From `start` until before `end`; None has no bound."""

    account: str
    currency: str = "USD"
    tenant_id: str = ""
    start: datetime | None = None
    end: datetime | None = None


def check(query: StatementQuery) -> StatementQuery:
    """NotFound for an unknown account; BadRequest names what else is wrong."""
    if query.account not in list(AccountKind):
        raise NotFound(
            f"There is no account {query.account[:40]!r}.",
            next_step=f"Use one of {', '.join(AccountKind)}.",
        )
    if query.currency not in MINOR_DIGITS:
        raise BadRequest(
            f"The currency {query.currency[:10]!r} is unknown.",
            next_step=f"Use one of {', '.join(sorted(MINOR_DIGITS))}.",
            param="currency",
        )
    for name, moment in (("from", query.start), ("to", query.end)):
        if moment is not None and moment.tzinfo is None:
            raise BadRequest(f"{name} has no time zone.", next_step="Append Z for UTC.", param=name)
    if query.start is not None and query.end is not None and query.start >= query.end:
        raise BadRequest("from is not before to.", next_step="Swap them.", param="from")
    return query


def balance_before(
    session: Session, query: StatementQuery, moment: datetime | None, after: int = 0
) -> int:
    """Picounits of all entries before a moment, or up to the entry `after`. Debits are positive."""
    if moment is None and not after:
        return 0
    where = _account(query)
    if after:
        where.append(tuple_(_T.at, _E.id) <= _place(session, after))
    else:
        where.append(_T.at < moment)
    found = session.scalar(_joined(select(func.sum(_E.units))).where(*where))
    return int(found or 0)


def read(
    session: Session, query: StatementQuery, *, after: int = 0, limit: int = MOST
) -> dict[str, Any]:
    """The opening balance and the entries behind the entry `after`; `next` is the `after` of the rest."""
    opening = balance_before(session, query, query.start, after)
    rows = _rows(session, query, after, limit + 1)
    shown, more = rows[:limit], len(rows) > limit
    lines, balance = [], opening
    for row in shown:
        balance += int(row.units)
        lines.append(_line(row, balance, query.currency))
    return {
        "object": "list",
        "account": query.account,
        "currency": query.currency,
        "opening": money(opening, query.currency),
        "data": lines,
        "closing": money(balance, query.currency),
        "next": shown[-1].id if more else None,
    }


def all_lines(session: Session, query: StatementQuery) -> Iterator[dict[str, Any]]:
    """Every entry of the range, some at a time."""
    after: int | None = 0
    while after is not None:
        part = read(session, query, after=after, limit=_AT_ONCE)
        yield from part["data"]
        after = part["next"]


def _rows(session: Session, query: StatementQuery, after: int, limit: int) -> list[Any]:
    where = _account(query)
    if query.start is not None:
        where.append(_T.at >= query.start)
    if query.end is not None:
        where.append(_T.at < query.end)
    if after:
        where.append(tuple_(_T.at, _E.id) > _place(session, after))
    columns = (_E.id, _E.units, _T.at, _T.kind, _T.reference, _T.memo, _T.tenant_id, Tenant.name)
    found = _joined(select(*columns)).outerjoin(Tenant, Tenant.id == _T.tenant_id)
    return list(session.execute(found.where(*where).order_by(_T.at, _E.id).limit(limit)).all())


def _joined(query: Any) -> Any:
    return (
        query.select_from(_E).join(_A, _A.id == _E.account_id).join(_T, _T.id == _E.transaction_id)
    )


def _account(query: StatementQuery) -> list[ColumnElement[bool]]:
    where = [_A.kind == query.account, _A.currency == query.currency]
    return [*where, _A.tenant_id == query.tenant_id] if query.tenant_id else where


def _place(session: Session, entry_id: int) -> Any:
    at = session.scalar(select(_T.at).join(_E, _E.transaction_id == _T.id).where(_E.id == entry_id))
    if at is None:
        raise BadRequest(
            f"There is no entry {entry_id}.", next_step="Take `next` of an answer.", param="after"
        )
    return tuple_(at, entry_id)


def _line(row: Any, balance: int, currency: str) -> dict[str, Any]:
    units = int(row.units)
    return {
        "entry": row.id,
        "at": row.at.isoformat(),
        "tenant_id": row.tenant_id,
        "tenant": row.name or row.tenant_id,
        "kind": row.kind,
        "reference": row.reference,
        "memo": row.memo,
        "debit": money(max(0, units), currency),
        "credit": money(max(0, -units), currency),
        "balance": money(balance, currency),
    }
