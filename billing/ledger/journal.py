"""Views of the ledger for accountants: trial balance, transactions, and a month's journal as CSV."""

import csv
import io
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from billing.amounts import money
from billing.ledger.ledger import AccountKind
from billing.ledger.tables import LedgerAccount, LedgerEntry, LedgerTransaction
from core.errors import BadRequest
from core.money import format_minor, round_to_minor
from core.tenants.models import Tenant

# Codes of a usual chart of accounts; an export may name others.
CODES = {
    AccountKind.CASH: "1000",
    AccountKind.RECEIVABLE: "1100",
    AccountKind.PREPAID: "2100",
    AccountKind.DEFERRED: "2150",
    AccountKind.PROMO: "2160",
    AccountKind.TAX: "2200",
    AccountKind.REVENUE: "4000",
    AccountKind.PROMOTION: "6100",
    AccountKind.BAD_DEBT: "6200",
    AccountKind.ROUNDING: "6900",
}
_A, _E, _T = LedgerAccount, LedgerEntry, LedgerTransaction


class Shape(StrEnum):
    PLAIN = "plain"
    NETSUITE = "netsuite"
    XERO = "xero"
    QUICKBOOKS = "quickbooks"


_HEADERS = {
    Shape.PLAIN: ("date", "account", "code", "currency", "debit", "credit", "memo"),
    Shape.NETSUITE: ("External ID", "Date", "Currency", "Account", "Debit", "Credit", "Memo"),
    Shape.XERO: ("*Narration", "*Date", "Description", "*AccountCode", "*TaxRate", "*Amount"),
    Shape.QUICKBOOKS: (
        "JournalNo",
        "JournalDate",
        "Currency",
        "AccountName",
        "Debits",
        "Credits",
        "Description",
    ),
}


def trial_balance(
    session: Session, at: datetime | None = None, tenant_id: str = ""
) -> list[dict[str, Any]]:
    """Debits and credits by account and currency, of all entries up to a moment. Their balances sum
    to zero in each currency."""
    where: list[ColumnElement[bool]] = [_T.at < at] if at is not None else []
    if tenant_id:
        where.append(_A.tenant_id == tenant_id)
    return [
        {
            "account": kind,
            "code": CODES[AccountKind(kind)],
            "currency": currency,
            "debit": money(debit, currency),
            "credit": money(credit, currency),
            "balance": money(debit - credit, currency),
        }
        for kind, currency, debit, credit in _sums(session, *where)
    ]


def transactions(
    session: Session, *, limit: int, tenant_id: str = "", search: str = ""
) -> list[dict[str, Any]]:
    """The `limit` newest transactions with their entries. `search` is part of a reference, memo, kind
    or of a tenant's name."""
    query = select(_T, Tenant.name).outerjoin(Tenant, Tenant.id == _T.tenant_id)
    if tenant_id:
        query = query.where(_T.tenant_id == tenant_id)
    if search:
        columns = (_T.reference, _T.memo, _T.kind, _T.tenant_id, Tenant.name)
        query = query.where(or_(*(each.icontains(search, autoescape=True) for each in columns)))
    rows = session.execute(query.order_by(_T.at.desc(), _T.id.desc()).limit(limit)).all()
    entries: dict[str, list[dict[str, Any]]] = {row[0].id: [] for row in rows}
    for transaction_id, kind, units, currency in session.execute(
        select(_E.transaction_id, _A.kind, _E.units, _E.currency)
        .join(_A, _A.id == _E.account_id)
        .where(_E.transaction_id.in_(entries))
        .order_by(_E.id)
    ):
        entries[transaction_id].append({"account": kind, "amount": money(units, currency)})
    return [
        {
            "id": each.id,
            "at": each.at.isoformat(),
            "tenant_id": each.tenant_id,
            "tenant": name or each.tenant_id,
            "kind": each.kind,
            "reference": each.reference,
            "memo": each.memo,
            "entries": entries[each.id],
        }
        for each, name in rows
    ]


def month_of(written: str) -> tuple[datetime, datetime]:
    """The bounds of `2026-01`, in UTC."""
    try:
        start = datetime.strptime(written, "%Y-%m").replace(tzinfo=UTC)
    except ValueError:
        raise BadRequest(
            f"{written!r} is not a month.", next_step="Write it as 2026-01.", param="month"
        ) from None
    return start, datetime(start.year + start.month // 12, start.month % 12 + 1, 1, tzinfo=UTC)


def journal(
    session: Session, month: str, shape: Shape = Shape.PLAIN, codes: Mapping[str, str] | None = None
) -> str:
    """CSV: one journal a currency with one line an account, in minor units. What rounding the lines
    leaves is on the line of the rounding account, so that each journal sums to zero."""
    start, end = month_of(month)
    named = {kind.value: code for kind, code in CODES.items()} | _checked(codes or {})
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(_HEADERS[shape])
    for currency, lines in _rounded(_sums(session, _T.at >= start, _T.at < end)).items():
        for account, minor in lines.items():
            if minor:
                writer.writerow(_row(shape, month, currency, (account, named[account], minor)))
    return out.getvalue()


def _rounded(sums: list[tuple[str, str, int, int]]) -> dict[str, dict[str, int]]:
    """Minor units by currency and account; debits are positive."""
    found: dict[str, dict[str, int]] = {}
    for kind, currency, debit, credit in sums:
        found.setdefault(currency, {})[kind] = round_to_minor(debit - credit, currency)[0]
    for lines in found.values():
        rounding = AccountKind.ROUNDING.value
        lines[rounding] = lines.get(rounding, 0) - sum(lines.values())
    return found


def _sums(session: Session, *where: ColumnElement[bool]) -> list[tuple[str, str, int, int]]:
    """Account, currency, debits and credits in picounits."""
    rows = session.execute(
        select(
            _A.kind,
            _E.currency,
            func.coalesce(func.sum(_E.units).filter(_E.units > 0), 0),
            func.coalesce(func.sum(-_E.units).filter(_E.units < 0), 0),
        )
        .join(_E, _E.account_id == _A.id)
        .join(_T, _T.id == _E.transaction_id)
        .where(*where)
        .group_by(_A.kind, _E.currency)
    )
    order = [kind.value for kind in CODES]
    found = [(row[0], row[1], int(row[2]), int(row[3])) for row in rows]
    return sorted(found, key=lambda row: (row[1], order.index(row[0])))


def _row(shape: Shape, month: str, currency: str, line: tuple[str, str, int]) -> tuple[str, ...]:
    account, code, minor = line
    last = month_of(month)[1].fromordinal(month_of(month)[1].toordinal() - 1)
    name, memo = f"TH-{month}-{currency}", f"{account.replace('_', ' ')}, {month}"
    debit = format_minor(minor, currency) if minor > 0 else ""
    credit = format_minor(-minor, currency) if minor < 0 else ""
    if shape is Shape.NETSUITE:
        return (name, f"{last:%m/%d/%Y}", currency, code, debit, credit, memo)
    if shape is Shape.XERO:
        # Xero has one signed amount, and no tax of its own on these lines.
        signed = format_minor(minor, currency)
        return (name, f"{last:%d/%m/%Y}", memo, code, "Tax Exempt", signed)
    if shape is Shape.QUICKBOOKS:
        return (name, f"{last:%m/%d/%Y}", currency, code, debit, credit, memo)
    return (f"{last:%Y-%m-%d}", account, code, currency, debit, credit, memo)


def _checked(codes: Mapping[str, str]) -> dict[str, str]:
    for account in codes:
        if account not in [kind.value for kind in CODES]:
            raise BadRequest(
                f"There is no account {account!r}.",
                next_step=f"Name one of {', '.join(CODES)}.",
                param="accounts",
            )
    return dict(codes)
