"""The operator's revenue by currency, from invoices, payments, credit and the daily roll-ups.

All amounts are exact: minor units for what was billed or paid, picounits for usage.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.invoices import DRAFT, FINAL, VOID
from billing.ledger import AccountKind
from billing.models import (
    CreditGrant,
    CreditNote,
    DailyTenantUsage,
    Invoice,
    LedgerAccount,
    Payment,
    Refund,
)
from billing.settlement import open_minor
from dashboards.filters import Range

# Ageing buckets: name, first and last day past due.
AGES = (
    ("not due", None, 0),
    ("1–30", 1, 30),
    ("31–60", 31, 60),
    ("61–90", 61, 90),
    ("over 90", 91, None),
)


@dataclass(slots=True)
class Revenue:
    """Revenue in one currency and date range. `deferred` and `outstanding` are as of now."""

    currency: str
    used: int = 0  # picounits: rated usage of the range, invoiced or not
    billed: int = 0  # this and the following: minor units
    collected: int = 0
    credited: int = 0
    refunded: int = 0
    failed: int = 0
    outstanding: int = 0
    deferred: int = 0  # picounits: prepaid and unused
    given: int = 0  # picounits: promotional credit granted in the range


@dataclass(slots=True)
class Debtor:
    tenant_id: str
    currency: str
    by_age: dict[str, int] = field(default_factory=lambda: dict.fromkeys((a[0] for a in AGES), 0))

    @property
    def total(self) -> int:
        return sum(self.by_age.values())


def read(session: Session, span: Range) -> list[Revenue]:
    """One row per currency, the most billed first."""
    found: dict[str, Revenue] = {}
    start, end = span.start, span.end

    def _add(name: str, rows: Iterable[Any]) -> None:
        for currency, amount in rows:
            row = found.setdefault(currency, Revenue(currency))
            setattr(row, name, getattr(row, name) + int(amount or 0))

    final = (Invoice.final_at >= start, Invoice.final_at < end, Invoice.status != VOID)
    settled = (Payment.settled_at >= start, Payment.settled_at < end)
    failed = (Payment.created_at >= start, Payment.created_at < end, Payment.status == "failed")
    _add(
        "used",
        _sums(
            session,
            DailyTenantUsage,
            "amount",
            DailyTenantUsage.at >= start,
            DailyTenantUsage.at < end,
        ),
    )
    _add("billed", _sums(session, Invoice, "total_minor", *final))
    _add(
        "collected",
        _sums(session, Payment, "amount_minor", *settled, Payment.status == "succeeded"),
    )
    _add("failed", _sums(session, Payment, "amount_minor", *failed))
    noted = (CreditNote.issued_at >= start, CreditNote.issued_at < end)
    _add("credited", _sums(session, CreditNote, "net_minor", *noted))
    _add("credited", _sums(session, CreditNote, "tax_minor", *noted))
    back = (Refund.created_at >= start, Refund.created_at < end, Refund.status != "failed")
    _add("refunded", _sums(session, Refund, "amount_minor", *back))
    gifts = (
        CreditGrant.kind == "promo",
        CreditGrant.granted_at >= start,
        CreditGrant.granted_at < end,
    )
    _add("given", _sums(session, CreditGrant, "granted", *gifts))
    wallets = LedgerAccount.kind == AccountKind.PREPAID.value
    ahead = _sums(session, LedgerAccount, "balance", wallets)
    _add("deferred", [(currency, -int(balance or 0)) for currency, balance in ahead])
    for each in outstanding(session, end):
        found.setdefault(each.currency, Revenue(each.currency)).outstanding += each.total
    return sorted(found.values(), key=lambda row: (-row.billed, -row.used, row.currency))


def outstanding(session: Session, now: datetime) -> list[Debtor]:
    """Open amounts of final invoices by tenant and days past due, largest first."""
    found: dict[tuple[str, str], Debtor] = {}
    for invoice in session.scalars(select(Invoice).where(Invoice.status == FINAL)):
        amount = open_minor(invoice)
        if amount:
            key = (invoice.tenant_id, invoice.currency)
            debtor = found.setdefault(key, Debtor(*key))
            debtor.by_age[age_of(invoice.due_at, now)] += amount
    return sorted(found.values(), key=lambda each: (-each.total, each.tenant_id))


def age_of(due_at: datetime | None, now: datetime) -> str:
    late = (now - due_at).days + 1 if due_at is not None and now > due_at else 0
    for name, first, last in AGES:
        if (first is None or late >= first) and (last is None or late <= last):
            return name
    raise AssertionError("the last ageing bucket is unbounded")


def by_month(
    session: Session, currency: str, now: datetime, months: int = 12
) -> dict[str, list[int]]:
    """Month -> [billed, collected] in minor units, oldest first, including empty months."""
    names = []
    year, month = now.year, now.month
    for _ in range(months):
        names.append(f"{year}-{month:02d}")
        year, month = (year - 1, 12) if month == 1 else (year, month - 1)
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    since = datetime.fromisoformat(f"{names[-1]}-01T00:00:00+00:00")
    for invoice in session.execute(
        select(Invoice.final_at, Invoice.total_minor).where(
            Invoice.final_at >= since,
            Invoice.currency == currency,
            Invoice.status.not_in((DRAFT, VOID)),
        )
    ):
        found[f"{invoice[0]:%Y-%m}"][0] += invoice[1]
    for payment in session.execute(
        select(Payment.settled_at, Payment.amount_minor).where(
            Payment.settled_at >= since,
            Payment.currency == currency,
            Payment.status == "succeeded",
        )
    ):
        found[f"{payment[0]:%Y-%m}"][1] += payment[1]
    return {name: found[name] for name in reversed(names)}


def _sums(session: Session, table: Any, column: str, *where: Any) -> list[tuple[str, Any]]:
    query = select(table.currency, func.sum(getattr(table, column))).where(*where)
    return [(row[0], row[1]) for row in session.execute(query.group_by(table.currency))]
