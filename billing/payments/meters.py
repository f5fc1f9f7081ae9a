"""Reports usage to Stripe for accounts that Stripe prices (`collection` is stripe_meters): hourly counts
from the roll-ups, as meter events.

The part of an hour's count not reported yet goes out as one more event, whose identifier names the
hour, the meter and the count reported before. Late usage is therefore reported too, and repeating a
report yields the same identifier.
"""

from collections import defaultdict
from datetime import datetime, timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_account
from billing.accounts.tables import BillingAccount
from billing.differences import Difference
from billing.invoicing import metered
from billing.invoicing.invoices import VOID
from billing.invoicing.tables import Invoice, InvoiceLine, MeteredSpan
from billing.payments import commands
from billing.payments.dunning import METERED
from billing.payments.tables import PaymentCommand
from billing.usage.tables import HourlyUsage
from core.database import Database

HORIZON = timedelta(days=60)  # late usage of older hours is not reported
OLDEST = timedelta(days=34)  # Stripe accepts 35
_H = HourlyUsage
METERS = {
    "tollhouse_requests": _H.requests,
    "tollhouse_input_tokens": _H.input_tokens - _H.cached_tokens,
    "tollhouse_cached_input_tokens": _H.cached_tokens,
    "tollhouse_output_tokens": _H.output_tokens,
}
_Counts = dict[tuple[str, datetime], int]  # by meter and hour


def report_all(database: Database, provider: str, at: datetime) -> int:
    """Queue unreported usage, tenant by tenant; returns the number of new events. What ended a while
    ago is reported too: its last hours, and late usage."""
    span = MeteredSpan
    with database.read() as session:
        late = select(span.tenant_id).where(span.ends_at.is_(None) | (span.ends_at >= at - HORIZON))
        tenants = session.scalars(
            select(BillingAccount.tenant_id)
            .where((BillingAccount.collection == METERED) | BillingAccount.tenant_id.in_(late))
            .order_by(BillingAccount.tenant_id)
        ).all()
    queued = 0
    for tenant_id in tenants:
        with database.transaction() as session:
            metered.follow(session, lock_account(session, tenant_id), at)
            queued += report(session, provider, tenant_id, at)
    return queued


def report(session: Session, provider: str, tenant_id: str, at: datetime) -> int:
    """Queue unreported usage of metered hours. Hold the account's lock."""
    session.execute(
        delete(PaymentCommand).where(
            PaymentCommand.kind == commands.USAGE,
            PaymentCommand.tenant_id == tenant_id,
            PaymentCommand.done_at < at - 2 * HORIZON,
        )
    )
    spans = metered.spans_of(session, [tenant_id]).get(tenant_id, [])
    used = _used(session, tenant_id, at - HORIZON, at)
    known = _reported(session, provider, tenant_id)
    rows = []
    for (meter, hour), count in sorted(used.items()):
        before = known.get((meter, hour), 0)
        if count <= before or not metered.inside(spans, hour):
            continue
        rows.append(
            commands.row(
                provider,
                tenant_id,
                kind=commands.USAGE,
                subject_id=_subject(meter, hour),
                key=f"usage:{tenant_id}:{meter}:{hour:%Y%m%dT%H}:{before}",
                at=at,
                payload={
                    "meter": meter,
                    "value": count - before,
                    "at": max(hour, at - OLDEST).isoformat(),
                },
            )
        )
    return commands.put_all(session, rows)


def differences(session: Session, provider: str, at: datetime) -> list[Difference]:
    """Hours whose reported count, including queued events, differs from what was used in metered hours,
    and invoices that bill metered usage or leave other usage out."""
    check, found = f"usage/{provider}", list[Difference]()
    tenants = session.scalars(select(MeteredSpan.tenant_id).distinct()).all()
    for tenant_id, spans in sorted(metered.spans_of(session, tenants).items()):
        used = _used(session, tenant_id, at - HORIZON, at - timedelta(hours=2))
        known = _reported(session, provider, tenant_id)
        for meter, hour in sorted(used.keys() | known.keys()):
            if not at - HORIZON <= hour <= at - timedelta(hours=3):
                continue
            count = used.get((meter, hour), 0) if metered.inside(spans, hour) else 0
            reported = known.get((meter, hour), 0)
            if reported != count:
                message = f"{meter} of {hour:%Y-%m-%d %H}:00 is {count}, but {reported} is reported"
                found.append(Difference(check, "amount", message, 1, 0, (), tenant_id))
        found += _of_invoices(session, check, tenant_id, spans)
    return found


def _of_invoices(
    session: Session, check: str, tenant_id: str, spans: list[metered.Span]
) -> list[Difference]:
    own = select(Invoice).where(Invoice.tenant_id == tenant_id, Invoice.number.is_not(None))
    invoices = session.scalars(own.where(Invoice.status != VOID).order_by(Invoice.number)).all()
    amounts = metered.amounts_of(session, {tenant_id: spans}, [each.period_id for each in invoices])
    lines = select(InvoiceLine.invoice_id, InvoiceLine.kind, func.sum(InvoiceLine.exact)).where(
        InvoiceLine.invoice_id.in_([each.id for each in invoices])
    )
    by_kind: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for invoice_id, kind, exact in session.execute(
        lines.group_by(InvoiceLine.invoice_id, InvoiceLine.kind)
    ):
        by_kind[invoice_id][kind] = int(exact)
    found = []
    for each in invoices:
        inside, other = amounts.get(each.period_id, (0, 0))
        kinds = by_kind[each.id]
        usage = kinds["usage"] + kinds["late_usage"] + kinds["included"]
        wanted = 0 if each.metered else min(inside, max(0, usage))
        off = wanted + kinds[metered.METERED]
        if off:
            message = f"invoice {each.label} bills usage that {check.partition('/')[2]} meters"
            found.append(Difference(check, "amount", message, 1, off, (), tenant_id))
        if each.metered and other:
            message = f"invoice {each.label} has usage that nobody collects"
            found.append(Difference(check, "lost", message, 1, other, (), tenant_id))
        if each.metered and each.external_id is not None:
            message = f"invoice {each.label} is for comparison only and was sent"
            found.append(Difference(check, "amount", message, 1, each.exact, (), tenant_id))
    return found


def _used(session: Session, tenant_id: str, start: datetime, end: datetime) -> _Counts:
    """Counts of hours that have ended."""
    sums = [func.sum(column) for column in METERS.values()]
    rows = session.execute(
        select(_H.at, *sums)
        .where(_H.tenant_id == tenant_id, _H.at >= start, _H.at <= end - timedelta(hours=1))
        .group_by(_H.at)
    )
    return {
        (meter, row[0]): int(count)
        for row in rows
        for meter, count in zip(METERS, row[1:], strict=True)
        if count
    }


def _reported(session: Session, provider: str, tenant_id: str) -> _Counts:
    found: dict[tuple[str, datetime], int] = defaultdict(int)
    rows = session.execute(
        select(PaymentCommand.subject_id, PaymentCommand.payload).where(
            PaymentCommand.provider == provider,
            PaymentCommand.tenant_id == tenant_id,
            PaymentCommand.kind == commands.USAGE,
        )
    )
    for subject, payload in rows:
        meter, _, hour = subject.partition("@")
        found[(meter, datetime.fromisoformat(hour))] += int(payload["value"])
    return found


def _subject(meter: str, hour: datetime) -> str:
    return f"{meter}@{hour.isoformat()}"
