"""Revenue recognition: fees that were billed ahead are deferred, and earned month by month.

The invoice books a fee as revenue. If its time reaches past the invoice's period, `recognise` moves it to
the account `deferred`, and after each month (UTC) moves back what the month earned, by its share of time.
What a cancellation returns is a line of its own with a negative amount over the rest of the same time, so
that both together earn what was delivered. A void invoice releases all that is left.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.invoicing.invoices import DRAFT, VOID
from billing.invoicing.tables import Invoice, InvoiceLine
from billing.ledger.ledger import AccountKind, Transaction, post_many, transfer
from billing.ledger.tables import LedgerTransaction
from core.money import Money

DEFERRAL, RECOGNITION = "deferral", "recognition"
_FEES = ("base_fee", "seats", "add_on")
_MICRO = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Part:
    """What one month earns of a deferred line."""

    month: str  # "2026-01"
    ends_at: datetime
    units: int


@dataclass(frozen=True, slots=True)
class Deferred:
    line: InvoiceLine
    invoice: Invoice

    def parts(self) -> list[Part]:
        """Shares by time that sum to the line."""
        line, found, before = self.line, [], 0
        whole = (line.ends_at - line.starts_at) // _MICRO
        for month, end in months(line.starts_at, line.ends_at):
            earned = line.exact * ((min(end, line.ends_at) - line.starts_at) // _MICRO) // whole
            found.append(Part(month, end, earned - before))
            before = earned
        return found


def months(start: datetime, end: datetime) -> Iterator[tuple[str, datetime]]:
    """Each calendar month (UTC) that overlaps the range, with its end."""
    at = datetime(start.year, start.month, 1, tzinfo=UTC)
    while at < end:
        after = datetime(at.year + at.month // 12, at.month % 12 + 1, 1, tzinfo=UTC)
        yield f"{at:%Y-%m}", after
        at = after


def deferred_lines(session: Session, tenant_id: str = "") -> list[Deferred]:
    query = (
        select(InvoiceLine, Invoice)
        .join(Invoice, Invoice.id == InvoiceLine.invoice_id)
        .where(
            InvoiceLine.kind.in_(_FEES),
            InvoiceLine.ends_at > Invoice.period_end,
            Invoice.status != DRAFT,
        )
        .order_by(InvoiceLine.id)
    )
    if tenant_id:
        query = query.where(Invoice.tenant_id == tenant_id)
    return [Deferred(line, invoice) for line, invoice in session.execute(query)]


def tenants_with_deferred(session: Session) -> list[str]:
    return sorted({each.invoice.tenant_id for each in deferred_lines(session)})


def recognise(session: Session, now: datetime, tenant_id: str = "") -> int:
    """Defer new lines and post the months that have ended; returns the number of transactions."""
    lines = deferred_lines(session, tenant_id)
    posted = set(
        session.scalars(
            select(LedgerTransaction.reference).where(
                LedgerTransaction.kind.in_((DEFERRAL, RECOGNITION)),
                LedgerTransaction.tenant_id.in_({each.invoice.tenant_id for each in lines}),
            )
        )
    )
    due = [each for line in lines for each in _due(line, now) if each.reference not in posted]
    post_many(session, due)
    return len(due)


def schedule(session: Session, tenant_id: str = "") -> list[dict[str, object]]:
    """Picounits by month and currency: what is earned of fees that were billed ahead."""
    sums: dict[tuple[str, str], int] = defaultdict(int)
    for each in deferred_lines(session, tenant_id):
        if each.invoice.status != VOID:
            for part in each.parts():
                sums[(part.month, each.invoice.currency)] += part.units
    return [
        {"month": month, "currency": currency, "units": units}
        for (month, currency), units in sorted(sums.items())
        if units
    ]


def _due(deferred: Deferred, now: datetime) -> Iterator[Transaction]:
    line, invoice = deferred.line, deferred.invoice
    assert invoice.final_at is not None
    money = Money(line.exact, invoice.currency)
    yield Transaction(
        invoice.tenant_id,
        DEFERRAL,
        f"deferral:{line.id}",
        invoice.final_at,
        transfer(AccountKind.REVENUE, AccountKind.DEFERRED, money),
        line.description,
    )
    for part in deferred.parts():
        if part.units and (part.ends_at <= now or invoice.status == VOID):
            at = min(now, max(part.ends_at - _MICRO, invoice.final_at))
            yield Transaction(
                invoice.tenant_id,
                RECOGNITION,
                f"recognition:{line.id}:{part.month}",
                at,
                transfer(
                    AccountKind.DEFERRED, AccountKind.REVENUE, Money(part.units, invoice.currency)
                ),
                f"{line.description}, {part.month}",
            )
