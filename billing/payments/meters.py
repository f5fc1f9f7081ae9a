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

from billing.accounts import lock_account
from billing.differences import Difference
from billing.dunning import METERED
from billing.models import BillingAccount, HourlyUsage, PaymentCommand
from billing.payments import commands
from core.database import Database

HORIZON = timedelta(days=60)  # late usage of older hours is not reported
OLDEST = timedelta(days=34)  # Stripe accepts 35
_START = "start"
_H = HourlyUsage
METERS = {
    "tollhouse_requests": _H.requests,
    "tollhouse_input_tokens": _H.input_tokens - _H.cached_tokens,
    "tollhouse_cached_input_tokens": _H.cached_tokens,
    "tollhouse_output_tokens": _H.output_tokens,
}
_Counts = dict[tuple[str, datetime], int]  # by meter and hour


def report_all(database: Database, provider: str, at: datetime) -> int:
    """Queue unreported usage, tenant by tenant; returns the number of new events."""
    with database.read() as session:
        tenants = session.scalars(
            select(BillingAccount.tenant_id)
            .where(BillingAccount.collection == METERED)
            .order_by(BillingAccount.tenant_id)
        ).all()
    queued = 0
    for tenant_id in tenants:
        with database.transaction() as session:
            lock_account(session, tenant_id)
            queued += report(session, provider, tenant_id, at)
    return queued


def report(session: Session, provider: str, tenant_id: str, at: datetime) -> int:
    """Queue unreported usage, from the hour of the first report on. Hold the account's lock."""
    start = _started(session, provider, tenant_id, at)
    session.execute(
        delete(PaymentCommand).where(
            PaymentCommand.kind == commands.USAGE,
            PaymentCommand.tenant_id == tenant_id,
            PaymentCommand.subject_id != _START,
            PaymentCommand.done_at < at - 2 * HORIZON,
        )
    )
    used = _used(session, tenant_id, max(start, at - HORIZON), at)
    known = _reported(session, provider, tenant_id)
    rows = []
    for (meter, hour), count in sorted(used.items()):
        before = known.get((meter, hour), 0)
        if count <= before:
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
    """Hours whose reported count, including queued events, differs from the used count."""
    found = []
    rows = session.scalars(
        select(BillingAccount.tenant_id).where(BillingAccount.collection == METERED)
    ).all()
    for tenant_id in rows:
        began = _start_of(session, provider, tenant_id)
        if began is None:
            continue
        used = _used(session, tenant_id, max(began, at - HORIZON), at - timedelta(hours=2))
        known = _reported(session, provider, tenant_id)
        for (meter, hour), count in sorted(used.items()):
            reported = known.get((meter, hour), 0)
            if reported != count:
                message = f"{meter} of {hour:%Y-%m-%d %H}:00 is {count}, but {reported} is reported"
                found.append(
                    Difference(f"usage/{provider}", "amount", message, 1, 0, (), tenant_id)
                )
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
            PaymentCommand.subject_id != _START,
        )
    )
    for subject, payload in rows:
        meter, _, hour = subject.partition("@")
        found[(meter, datetime.fromisoformat(hour))] += int(payload["value"])
    return found


def _started(session: Session, provider: str, tenant_id: str, at: datetime) -> datetime:
    known = _start_of(session, provider, tenant_id)
    if known is not None:
        return known
    hour = at.replace(minute=0, second=0, microsecond=0)
    key = f"usage:{tenant_id}:{_START}"
    row = commands.row(
        provider, tenant_id, kind=commands.USAGE, subject_id=_START, key=key, at=hour
    )
    commands.put_all(session, [row | {"done_at": at}])
    return hour


def _start_of(session: Session, provider: str, tenant_id: str) -> datetime | None:
    return session.scalar(
        select(PaymentCommand.created_at).where(
            PaymentCommand.provider == provider,
            PaymentCommand.tenant_id == tenant_id,
            PaymentCommand.subject_id == _START,
            PaymentCommand.kind == commands.USAGE,
        )
    )


def _subject(meter: str, hour: datetime) -> str:
    return f"{meter}@{hour.isoformat()}"
