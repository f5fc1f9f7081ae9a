"""Customers by the month of their first invoice: how many are still billed in later months, and for
how much. Two groupings in the database; what is read has at most a row for each pair of months.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from billing.invoicing.invoices import DRAFT, VOID
from billing.invoicing.tables import Invoice
from billing.reports.revenue import last_months

MONTHS = 12


@dataclass(frozen=True, slots=True)
class Cohort:
    """Figures by months since the first invoice; 0 is its own month. `None` is still to come."""

    month: str  # 2026-11
    customers: list[int | None] = field(default_factory=list)
    billed: list[int | None] = field(default_factory=list)  # minor units before tax

    @property
    def size(self) -> int:
        return self.customers[0] or 0

    def retained(self, age: int) -> float | None:
        """Share of its customers that are billed after so many months."""
        count = self.customers[age]
        return None if count is None or not self.size else count / self.size


def currencies(session: Session) -> list[str]:
    """Of final invoices, the one with the most of them first."""
    query = select(Invoice.currency).where(*_billed()).group_by(Invoice.currency)
    return list(session.scalars(query.order_by(func.count().desc(), Invoice.currency)))


def read(session: Session, currency: str, now: datetime) -> list[Cohort]:
    """The cohorts of the last months, the oldest first; months without new customers are left out."""
    months = last_months(now, MONTHS)
    month = _month_of(Invoice.final_at, session.get_bind().dialect.name)
    amount = func.sum(Invoice.total_minor - Invoice.tax_minor)
    billed = (
        select(Invoice.tenant_id, month.label("month"), amount.label("amount"))
        .where(Invoice.currency == currency, *_billed())
        .group_by(Invoice.tenant_id, month)
        .having(amount > 0)
        .cte("billed")
    )
    first = func.min(billed.c.month)
    firsts = (
        select(billed.c.tenant_id, first.label("cohort"))
        .group_by(billed.c.tenant_id)
        .having(first >= months[0])
        .cte("firsts")
    )
    query = (
        select(firsts.c.cohort, billed.c.month, func.count(), func.sum(billed.c.amount))
        .join(billed, billed.c.tenant_id == firsts.c.tenant_id)
        .group_by(firsts.c.cohort, billed.c.month)
    )
    found = {(row[0], row[1]): (int(row[2]), int(row[3])) for row in session.execute(query)}
    return [_cohort(name, months, found) for name in months if (name, name) in found]


def _cohort(name: str, months: list[str], found: dict[tuple[str, str], tuple[int, int]]) -> Cohort:
    later = months[months.index(name) :]
    pairs = [found.get((name, month), (0, 0)) for month in later]
    to_come: list[int | None] = [None] * (MONTHS - len(later))
    customers = [*(count for count, _ in pairs), *to_come]
    return Cohort(name, customers, [*(amount for _, amount in pairs), *to_come])


def _billed() -> list[ColumnElement[bool]]:
    return [Invoice.status.not_in((DRAFT, VOID)), Invoice.final_at.is_not(None)]


def _month_of(column: Any, dialect: str) -> ColumnElement[str]:
    """In UTC, such as 2026-11."""
    if dialect == "postgresql":
        return func.to_char(func.timezone("UTC", column), "YYYY-MM")
    return func.strftime("%Y-%m", column)
