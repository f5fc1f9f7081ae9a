"""Numbers that were given before a restore: each is given again to the same tenant and period, or to
nobody."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingPeriod
from billing.differences import Difference, amount
from billing.invoicing.tables import Invoice, ReservedNumber
from core.money import units_of_minor
from core.tenants.models import Tenant

INVOICE, CREDIT_NOTE = "invoice", "credit_note"
Reserved = dict[tuple[str, datetime], ReservedNumber]  # by tenant and start of the period


def of_periods(session: Session, periods: Sequence[BillingPeriod]) -> Reserved:
    rows = session.scalars(
        select(ReservedNumber).where(
            ReservedNumber.kind == INVOICE,
            ReservedNumber.used_at.is_(None),
            ReservedNumber.tenant_id.in_({each.tenant_id for each in periods}),
            ReservedNumber.period_start.is_not(None),
        )
    )
    return {(row.tenant_id, row.period_start): row for row in rows if row.period_start}


def given(session: Session, kind: str) -> dict[str, tuple[int, int, int]]:
    """By seller: how many reserved numbers no document has, the lowest and the highest."""
    rows = session.execute(
        select(
            ReservedNumber.seller_id,
            func.count(),
            func.min(ReservedNumber.number),
            func.max(ReservedNumber.number),
        )
        .where(ReservedNumber.kind == kind, ReservedNumber.used_at.is_(None))
        .group_by(ReservedNumber.seller_id)
    )
    return {row[0]: (int(row[1]), int(row[2]), int(row[3])) for row in rows}


def numbers_have_no_gap(session: Session) -> list[Difference]:
    """But for numbers that are reserved, with a reason."""
    found: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    rows = session.execute(
        select(Invoice.seller_id, func.count(), func.min(Invoice.number), func.max(Invoice.number))
        .where(Invoice.number.is_not(None))
        .group_by(Invoice.seller_id)
    )
    for seller, count, first, last in rows:
        found[seller].append((count, first or 0, last or 0))
    for seller, each in given(session, INVOICE).items():
        found[seller].append(each)
    differences = []
    for seller, parts in sorted(found.items()):
        count = sum(each[0] for each in parts)
        first, last = min(each[1] for each in parts), max(each[2] for each in parts)
        if last - first + 1 != count:
            says = f"seller {seller} has {count} numbers from {first} to {last}"
            differences.append(Difference("invoices", "lost", says))
    return differences


def restored_invoices(session: Session) -> list[Difference]:
    """Invoices that were issued before a restore and are not what they were, or not there."""
    rows: Any = session.execute(
        select(ReservedNumber, Invoice, Tenant.id)
        .outerjoin(
            Invoice,
            (Invoice.seller_id == ReservedNumber.seller_id)
            & (Invoice.number == ReservedNumber.number),
        )
        .outerjoin(Tenant, Tenant.id == ReservedNumber.tenant_id)
        .where(ReservedNumber.kind == INVOICE, ReservedNumber.tenant_id != "")
        .order_by(ReservedNumber.seller_id, ReservedNumber.number)
    )
    found = []
    for row, invoice, tenant in rows:
        due = row.due_minor or 0
        if invoice is None:
            who = "" if tenant else ", whom the database does not know"
            says = (
                f"{row.label} was issued to {row.tenant_id}{who} before a restore; it is not there"
            )
            found.append(Difference("restored invoices", "lost", says, 1, 0, (), tenant or ""))
        elif row.due_minor is not None and invoice.due_minor != row.due_minor:
            says = f"{row.label} was due with {due} before a restore, and is due with {invoice.due_minor}"
            units = units_of_minor(invoice.due_minor - due, invoice.currency)
            found.append(amount("restored invoices", says, units, (), row.tenant_id))
    return found
