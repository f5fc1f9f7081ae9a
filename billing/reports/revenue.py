"""The operator's revenue by currency, from invoices, payments, credit and the daily roll-ups.

All amounts are exact: minor units for what was billed or paid, picounits for usage.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.invoicing.invoices import DRAFT, FINAL, VOID
from billing.invoicing.open_amounts import open_minor
from billing.invoicing.tables import CreditNote, Invoice
from billing.ledger.ledger import AccountKind
from billing.ledger.tables import CreditGrant, LedgerAccount
from billing.payments.tables import Payment, Refund
from billing.pricing.exchange_rates import Converter
from billing.usage.day_range import Range
from billing.usage.tables import DailyTenantUsage
from core.money import round_to_minor, units_of_minor

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


UNITS = ("used", "deferred", "given")  # in picounits; the other figures are minor units
_Flow = tuple[str, str, datetime, int]  # figure, currency, moment, amount in its unit


def read(session: Session, span: Range) -> list[Revenue]:
    """One row per currency, the most billed first."""
    found: dict[str, Revenue] = {}
    for name, currency, _, amount in _flows(session, span):
        row = found.setdefault(currency, Revenue(currency))
        setattr(row, name, getattr(row, name) + amount)
    return sorted(found.values(), key=lambda row: (-row.billed, -row.used, row.currency))


def read_in(session: Session, span: Range, converter: Converter) -> Revenue:
    """All currencies as one: each amount at the rate of its day, what is as of now at that of the last
    day. Rounded once per figure."""
    units: dict[str, int] = defaultdict(int)
    for name, currency, at, amount in _flows(session, span):
        exact = amount if name in UNITS else units_of_minor(amount, currency)
        units[name] += converter.convert(exact, currency, at.date())
    whole = Revenue(converter.currency)
    for name, exact in units.items():
        minor = round_to_minor(exact, converter.currency)[0]
        setattr(whole, name, exact if name in UNITS else minor)
    return whole


def _flows(session: Session, span: Range) -> Iterator[_Flow]:
    start, end = span.start, span.end
    last = end - timedelta(1)

    def _sums(name: str, table: Any, column: str, at: Any, *where: Any) -> Iterator[_Flow]:
        query = select(table.currency, at, func.sum(getattr(table, column)))
        query = query.where(at >= start, at < end, *where).group_by(table.currency, at)
        for currency, moment, amount in session.execute(query):
            yield name, currency, moment, int(amount or 0)

    usage, settled = DailyTenantUsage, Payment.status == "succeeded"
    yield from _sums("used", usage, "amount", usage.at)
    yield from _sums("billed", Invoice, "total_minor", Invoice.final_at, Invoice.status != VOID)
    yield from _sums("collected", Payment, "amount_minor", Payment.settled_at, settled)
    failed = Payment.status == "failed"
    yield from _sums("failed", Payment, "amount_minor", Payment.created_at, failed)
    for column in ("net_minor", "tax_minor"):
        yield from _sums("credited", CreditNote, column, CreditNote.issued_at)
    stands = Refund.status != "failed"
    yield from _sums("refunded", Refund, "amount_minor", Refund.created_at, stands)
    gift = CreditGrant.kind == "promo"
    yield from _sums("given", CreditGrant, "granted", CreditGrant.granted_at, gift)
    wallets = select(LedgerAccount.currency, func.sum(LedgerAccount.balance)).where(
        LedgerAccount.kind == AccountKind.PREPAID.value
    )
    for currency, balance in session.execute(wallets.group_by(LedgerAccount.currency)):
        yield "deferred", currency, last, -int(balance or 0)
    for each in outstanding(session, end):
        yield "outstanding", each.currency, last, each.total


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
    names = last_months(now, months)
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    since = datetime.fromisoformat(f"{names[0]}-01T00:00:00+00:00")
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
    return {name: found[name] for name in names}


def last_months(now: datetime, months: int) -> list[str]:
    """Such as 2026-11, the oldest first, up to the current one."""
    last = now.year * 12 + now.month - 1
    return [f"{each // 12}-{each % 12 + 1:02d}" for each in range(last - months + 1, last + 1)]
