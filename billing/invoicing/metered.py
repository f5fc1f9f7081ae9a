"""Hours whose usage Stripe prices (`collection` is stripe_meters), and what that takes off invoices.

A span runs from the hour of the change to stripe_meters to the hour of the change to another way. Usage
of its hours is reported to Stripe's meters and is on no invoice that is collected: an invoice over
metered hours alone serves for comparison, any other has a line that takes the metered usage off.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount, BillingPeriod
from billing.invoicing.invoice_lines import Line
from billing.invoicing.tables import MeteredSpan
from billing.usage.rollups import ADJUSTMENT
from billing.usage.tables import HourlyUsage
from core.money import round_to_minor

WAY = "stripe_meters"
METERED = "metered"  # the kind of the line
_NEVER = datetime.max.replace(tzinfo=UTC)
_USAGE = ("usage", "late_usage", "included")
Span = tuple[datetime, datetime]


@dataclass(frozen=True, slots=True)
class Metered:
    spans: dict[str, list[Span]] = field(default_factory=dict)  # by tenant id
    # By period id: picounits of usage inside and outside of metered hours.
    amounts: dict[str, tuple[int, int]] = field(default_factory=dict)


def follow(session: Session, account: BillingAccount, now: datetime) -> None:
    """Begin or end the span as the locked account's way of collection says."""
    hour = now.replace(minute=0, second=0, microsecond=0)
    row = MeteredSpan
    running = session.scalar(
        select(row).where(row.tenant_id == account.tenant_id, row.ends_at.is_(None))
    )
    if account.collection == WAY and running is None:
        known = session.get(row, (account.tenant_id, hour))
        if known is None:
            session.add(row(tenant_id=account.tenant_id, starts_at=hour))
        else:
            known.ends_at = None
    elif account.collection != WAY and running is not None:
        running.ends_at = max(hour, running.starts_at)
    session.flush()


def spans_of(session: Session, tenant_ids: Iterable[str]) -> dict[str, list[Span]]:
    """Spans in order; those that meet are one. A running one ends at the end of time."""
    row = MeteredSpan
    found: dict[str, list[Span]] = {}
    query = select(row.tenant_id, row.starts_at, row.ends_at)
    query = query.where(row.tenant_id.in_(set(tenant_ids))).order_by(row.tenant_id, row.starts_at)
    for tenant_id, start, ended in session.execute(query):
        end, spans = ended or _NEVER, found.setdefault(tenant_id, [])
        if spans and spans[-1][1] >= start:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        elif end > start:
            spans.append((start, end))
    return found


def inside(spans: Sequence[Span], at: datetime) -> bool:
    return any(start <= at < end for start, end in spans)


def read(session: Session, periods: Sequence[BillingPeriod]) -> Metered:
    spans = spans_of(session, {period.tenant_id for period in periods})
    ids = [period.id for period in periods if period.tenant_id in spans]
    return Metered(spans, amounts_of(session, spans, ids)) if ids else Metered()


def amounts_of(
    session: Session, spans: dict[str, list[Span]], period_ids: Sequence[str]
) -> dict[str, tuple[int, int]]:
    use, amounts = HourlyUsage, dict[str, tuple[int, int]]()
    rows = session.execute(
        select(use.bill_period_id, use.tenant_id, use.at, func.sum(use.amount))
        .where(use.bill_period_id.in_(period_ids), use.kind != ADJUSTMENT)
        .group_by(use.bill_period_id, use.tenant_id, use.at)
    )
    for period_id, tenant_id, at, units in rows:
        metered, other = amounts.get(period_id, (0, 0))
        if inside(spans.get(tenant_id, ()), at):
            amounts[period_id] = metered + int(units), other
        else:
            amounts[period_id] = metered, other + int(units)
    return amounts


def take_off(
    found: Metered, lines: Sequence[Line], period: BillingPeriod, currency: str
) -> tuple[list[Line], bool]:
    """The lines for metered usage, and whether the whole invoice is for comparison only. Included usage
    counts for metered usage first, so that no more is taken off than there is."""
    spans = found.spans.get(period.tenant_id, [])
    metered, other = found.amounts.get(period.id, (0, 0))
    covered = any(start <= period.starts_at and end >= period.ends_at for start, end in spans)
    if covered and not other:
        return [], True
    exact = -min(metered, max(0, sum(each.exact for each in lines if each.kind in _USAGE)))
    if not exact:
        return [], False
    minor = round_to_minor(exact, currency)[0]
    text = "Usage that Stripe meters and bills"
    return [Line(METERED, text, exact, minor, period.starts_at, period.ends_at)], False
