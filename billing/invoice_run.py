"""The invoice run: every tenant's periods, one small transaction each, so that it can be killed and
run again. A period that is done is skipped; running again is a no-op.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing import invoices, rating
from billing.accounts import Periods, ensure_account, lock_account
from billing.models import BillingAccount, BillingPeriod, Invoice, Subscription
from core.clock import Clock
from core.database import Database
from core.errors import TollhouseError

Progress = Callable[[int, int], None]  # tenants done, tenants in all


@dataclass
class RunResult:
    """Ids of the invoices that the run looked at, by what it did, and what went wrong."""

    drafted: list[str] = field(default_factory=list)
    finalised: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # tenant id -> why

    @property
    def all_ids(self) -> list[str]:
        return [*self.finalised, *self.drafted, *self.unchanged]


def rate_all(database: Database, clock: Clock) -> int:
    """Rate everything that waits, batch by batch."""
    events = 0
    while True:
        with database.transaction() as session:
            rated = rating.rate(session, clock)
        if rated.batches == 0:
            return events
        events += rated.events


def run(
    database: Database,
    clock: Clock,
    tenant_ids: Iterable[str] | None = None,
    *,
    final: bool = True,
    current: bool = True,
    progress: Progress | None = None,
) -> RunResult:
    """Make final what is due, draft what is not yet; `current` drafts the running period too."""
    rate_all(database, clock)
    chosen = sorted(tenant_ids) if tenant_ids is not None else _everybody(database)
    result = RunResult()
    for done, tenant_id in enumerate(chosen, 1):
        try:
            _one_tenant(database, clock, tenant_id, result, final, current)
        except TollhouseError as error:
            result.failed[tenant_id] = str(error)
        if progress is not None:
            progress(done, len(chosen))
    return result


def due_periods(session: Session, account: BillingAccount, now: datetime) -> list[str]:
    """Ids of the tenant's periods up to now that are not closed; periods without any are made."""
    periods = Periods(session)
    tenant = account.tenant_id
    last_end = session.scalar(
        select(func.max(BillingPeriod.ends_at)).where(
            BillingPeriod.tenant_id == tenant, BillingPeriod.starts_at <= now
        )
    )
    if last_end is None:
        last_end = session.scalar(
            select(func.min(Subscription.starts_at)).where(Subscription.tenant_id == tenant)
        )
    at = last_end or now
    while at <= now:
        at = periods.around(account, at).ends_at
    rows = session.scalars(
        select(BillingPeriod.id)
        .where(
            BillingPeriod.tenant_id == tenant,
            BillingPeriod.closed_at.is_(None),
            BillingPeriod.starts_at <= now,
        )
        .order_by(BillingPeriod.starts_at)
    )
    return list(rows)


def _everybody(database: Database) -> list[str]:
    with database.read() as session:
        return list(
            session.scalars(select(BillingAccount.tenant_id).order_by(BillingAccount.tenant_id))
        )


def _one_tenant(
    database: Database,
    clock: Clock,
    tenant_id: str,
    result: RunResult,
    final: bool,
    current: bool,
) -> None:
    now = clock.now()
    with database.transaction() as session:
        ensure_account(session, tenant_id, now)
        account = lock_account(session, tenant_id)
        waiting = due_periods(session, account, now)
        result.unchanged += session.scalars(
            select(Invoice.id).where(
                Invoice.tenant_id == tenant_id,
                Invoice.status != invoices.DRAFT,
                Invoice.period_end > now - timedelta(days=45),
            )
        )
    for period_id in waiting:
        with database.transaction() as session:
            period = session.get_one(BillingPeriod, period_id)
            if period.ends_at > now and not current:
                continue
            closable = final and invoices.final_from(session, period) <= now
            make = invoices.finalise if closable else invoices.draft
            invoice = make(session, clock, period_id)
            if invoice is not None:
                (result.finalised if closable else result.drafted).append(invoice.id)
