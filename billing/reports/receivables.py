"""What all tenants owe: final invoices with search, and their open amounts by age."""

from datetime import date, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, case, desc, func, or_, select, tuple_
from sqlalchemy.orm import QueryableAttribute, Session

from billing.invoicing.invoices import DRAFT, FINAL
from billing.invoicing.tables import Invoice
from billing.payments.tables import Payment
from billing.pricing.exchange_rates import Converter
from core.money import round_to_minor, units_of_minor
from core.tenants.models import Tenant

# Days past due: name -> (from, to); None has no bound.
BUCKETS: dict[str, tuple[int | None, int | None]] = {
    "not due": (None, 0),
    "1-30 days": (0, 30),
    "31-60 days": (30, 60),
    "61-90 days": (60, 90),
    "over 90 days": (90, None),
}
_OPEN = Invoice.due_minor - Invoice.paid_minor - Invoice.credited_minor
_INVOICE_ORDER = (Invoice.period_start, Invoice.id)
_PAYMENT_ORDER = (Payment.created_at, Payment.id)
_OWED = and_(Invoice.status == FINAL, _OPEN > 0)


def ageing(
    session: Session, now: datetime, converter: Converter | None = None
) -> list[dict[str, Any]]:
    """By currency: the open minor units of each bucket, and their sum as `total`. With a converter in its
    currency alone, at the rate of the day of `now`, each bucket rounded once."""
    whens = [(_late(name, now), name) for name in BUCKETS]
    bucket = case(*whens).label("bucket")
    rows = session.execute(
        select(Invoice.currency, bucket, func.sum(_OPEN))
        .where(_OWED)
        .group_by(Invoice.currency, bucket)
    )
    found: dict[str, dict[str, Any]] = {}
    for currency, name, minor in rows:
        line = found.setdefault(
            currency, {"currency": currency} | dict.fromkeys(BUCKETS, 0) | {"total": 0}
        )
        line[name] += int(minor)
        line["total"] += int(minor)
    lines = [found[currency] for currency in sorted(found)]
    return lines if converter is None else _in_one(lines, converter, now)


def _in_one(
    lines: list[dict[str, Any]], converter: Converter, now: datetime
) -> list[dict[str, Any]]:
    whole: dict[str, Any] = {"currency": converter.currency}
    for name in BUCKETS:
        exact = sum(
            converter.convert(
                units_of_minor(line[name], line["currency"]), line["currency"], now.date()
            )
            for line in lines
        )
        whole[name] = round_to_minor(exact, converter.currency)[0]
    whole["total"] = sum(whole[name] for name in BUCKETS)
    return [whole]


def invoices(
    session: Session,
    now: datetime,
    *,
    search: str = "",
    state: str = "",
    bucket: str = "",
    before: str = "",
    limit: int = 100,
) -> list[tuple[Invoice, str]]:
    """The newest first, with the tenant's name. `search` is part of a number or a tenant's name; `before`
    is the id of the last invoice of the page before."""
    query = select(Invoice, Tenant.name).outerjoin(Tenant, Tenant.id == Invoice.tenant_id)
    query = _matching(query, now, search, state, bucket)
    last = session.get(Invoice, before) if before else None
    if last is not None:
        query = query.where(tuple_(*_INVOICE_ORDER) < (last.period_start, last.id))
    rows = session.execute(query.order_by(*map(desc, _INVOICE_ORDER)).limit(limit))
    return [(invoice, name or invoice.tenant_id) for invoice, name in rows]


def billed(
    session: Session,
    now: datetime,
    converter: Converter,
    *,
    search: str = "",
    state: str = "",
    bucket: str = "",
) -> int:
    """Minor units of the totals of all matching invoices, each at the rate of the day on which it became
    final (a draft's: of `now`), rounded once."""
    at = Invoice.final_at
    query = select(Invoice.currency, at, func.sum(Invoice.total_minor)).outerjoin(
        Tenant, Tenant.id == Invoice.tenant_id
    )
    query = _matching(query, now, search, state, bucket).group_by(Invoice.currency, at)
    exact = 0
    for currency, final_at, minor in session.execute(query):
        day = (final_at or now).date()
        exact += converter.convert(units_of_minor(int(minor), currency), currency, day)
    return round_to_minor(exact, converter.currency)[0]


def payments(
    session: Session, *, search: str = "", state: str = "", before: str = "", limit: int = 100
) -> list[tuple[Payment, str, str | None]]:
    """The newest first, with the tenant's name and the invoice's number. `search` is part of a reference,
    the provider's id, a number or a tenant's name."""
    query = (
        select(Payment, Tenant.name, Invoice.label)
        .outerjoin(Tenant, Tenant.id == Payment.tenant_id)
        .outerjoin(Invoice, Invoice.id == Payment.invoice_id)
    )
    if search:
        columns = (Payment.reference, Payment.external_id, Payment.id, Invoice.label, Tenant.name)
        query = query.where(_found(search, *columns))
    if state:
        query = query.where(Payment.status == state)
    last = session.get(Payment, before) if before else None
    if last is not None:
        query = query.where(tuple_(*_PAYMENT_ORDER) < (last.created_at, last.id))
    rows = session.execute(query.order_by(*map(desc, _PAYMENT_ORDER)).limit(limit))
    return [(payment, name or payment.tenant_id, label) for payment, name, label in rows]


def first_day(session: Session, now: datetime) -> date:
    """The day of the first final invoice, from which on rates are needed."""
    found = session.scalar(select(func.min(Invoice.final_at)))
    return (found or now).date()


def drafts(session: Session, now: datetime) -> int:
    """Drafts of ended periods, which wait for their invoice run."""
    query = select(func.count()).where(Invoice.status == DRAFT, Invoice.period_end <= now)
    return int(session.scalar(query) or 0)


def _matching(query: Any, now: datetime, search: str, state: str, bucket: str) -> Any:
    if search:
        query = query.where(
            _found(search, Invoice.label, Tenant.name, Tenant.display_name, Invoice.id)
        )
    if state:
        query = query.where(Invoice.status == state)
    if bucket in BUCKETS:
        query = query.where(_OWED, _late(bucket, now))
    return query


def _found(search: str, *columns: QueryableAttribute[Any]) -> ColumnElement[bool]:
    return or_(*(each.icontains(search, autoescape=True) for each in columns))


def _late(name: str, now: datetime) -> ColumnElement[bool]:
    """An invoice without a due date counts as not due."""
    first, last = BUCKETS[name]
    if first is None:
        return or_(Invoice.due_at.is_(None), Invoice.due_at >= now)
    newest = Invoice.due_at < now - timedelta(days=first)
    if last is None:
        return newest
    return and_(newest, Invoice.due_at >= now - timedelta(days=last))
