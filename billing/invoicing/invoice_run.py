"""The invoice run: drafts and finalizes every tenant's due periods, many tenants per transaction to
save round trips. It can be killed and rerun at any time: finished periods are skipped.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.orm import Session

from billing.accounts.accounts import Periods, ensure_accounts, lock_accounts
from billing.accounts.tables import BillingAccount, BillingPeriod
from billing.invoicing import invoices
from billing.invoicing.invoice_builder import open_builder
from billing.invoicing.tables import Invoice
from billing.organisations import organisations
from billing.rating.rating_worker import TAKE_OVER_S, rate_all
from billing.restores import restores
from billing.subscriptions.tables import Subscription
from billing.taxes.tax_quotes import with_taxes
from billing.taxes.taxes import TaxService
from core.clock import Clock
from core.database import Database
from core.errors import Conflict, TollhouseError

log = logging.getLogger("tollhouse.billing")
TENANTS_AT_ONCE = 100  # locked together, for a few tenths of a second
RECENT = timedelta(days=45)
PATIENCE_S = 5.0  # for usage that a worker rates while a person waits
LONGEST = timedelta(days=32)  # upper bound of a period
# Rejections, and errors caused by one tenant's broken rows. A lost database stops the whole run.
_OF_ONE_TENANT = (
    TollhouseError,
    ArithmeticError,
    AssertionError,
    DataError,
    IntegrityError,
    LookupError,
    TypeError,
    ValueError,
)
Progress = Callable[[int, int], None]  # tenants done, tenants in total


@dataclass
class RunResult:
    """Invoice ids by what the run did with them, and the failures."""

    drafted: list[str] = field(default_factory=list)
    finalised: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # tenant id -> reason

    @property
    def all_ids(self) -> list[str]:
        return [*self.finalised, *self.drafted, *self.unchanged]


def run(
    database: Database,
    clock: Clock,
    tenant_ids: Iterable[str] | None = None,
    *,
    final: bool = True,
    current: bool = True,
    progress: Progress | None = None,
    taxes: TaxService | None = None,
    patience_s: float = TAKE_OVER_S,
    grace: bool = True,
) -> RunResult:
    """Finalize due periods and draft the others; `current` includes the running period. `taxes` is a
    remote tax service; None applies our own rates. `patience_s` is how long usage that another worker
    rates is waited for, in seconds. Without `grace`, an ended period is final at once; usage that comes
    late is on the next invoice.
    """
    rate_all(database, clock, patience_s=patience_s)
    with database.read() as session:
        behind = restores.open_recovery(session)
    if behind is not None and final:
        log.error("the invoices stay drafts: the database was restored. %s", restores.NEXT_STEP)
        final = False
    chosen = sorted(tenant_ids) if tenant_ids is not None else _everybody(database)
    job = _Job(database, clock, RunResult(), final, current, taxes, grace)
    done = 0
    with database.read() as session:
        groups = organisations.by_depth(session, chosen)
    for group in groups:
        for first in range(0, len(group), TENANTS_AT_ONCE):
            some = group[first : first + TENANTS_AT_ONCE]
            job.bill(some)
            done += len(some)
            if progress is not None:
                progress(done, len(chosen))
    return job.result


def finalise_now(
    database: Database, clock: Clock, tenant_id: str, taxes: TaxService | None
) -> list[str]:
    """Finalise the ended periods of one tenant without their grace; the ids of its new invoices.
    Conflict if there is none, or if it cannot be billed."""
    result = run(
        database, clock, [tenant_id], current=False, taxes=taxes, patience_s=PATIENCE_S, grace=False
    )
    if tenant_id in result.failed:
        raise Conflict(
            f"No invoice can be made final: {result.failed[tenant_id]}",
            next_step="Settle that, then finalise again.",
        )
    if result.finalised:
        return result.finalised
    with database.read() as session:
        if restores.open_recovery(session) is not None:
            raise Conflict(
                "The database was restored, so invoices stay drafts.", next_step=restores.NEXT_STEP
            )
    if result.drafted:
        raise Conflict(
            "The ended period waits for the invoices of the organisations that this one pays for.",
            next_step="Finalise theirs first.",
        )
    raise Conflict(
        "No ended period has anything to bill that is not final yet.",
        next_step="Wait until the running period ends; its draft shows the amounts so far.",
    )


@dataclass(frozen=True, slots=True)
class _Job:
    database: Database
    clock: Clock
    result: RunResult
    final: bool
    current: bool
    taxes: TaxService | None
    grace: bool = True
    seen: set[str] = field(default_factory=set)  # invoice ids already in the result

    def bill(self, tenants: list[str]) -> None:
        """One period of each tenant per transaction, oldest first, because an invoice uses credit
        before later ones. If a transaction fails, each tenant is retried alone, so that only the
        failing one is left out.
        """
        try:
            with self.database.transaction() as session:
                waiting = due_periods(session, tenants, self.clock.now(), current=self.current)
                unchanged = _recent(session, tenants, self.clock.now())
            self.result.unchanged += self._new(unchanged)
            rounds = max((len(each) for each in waiting.values()), default=0)
            shown_credit: dict[str, int] = {}
            for number in range(rounds):
                periods = [each[number] for each in waiting.values() if number < len(each)]
                shown_credit = self._one_each(periods, shown_credit)
        except _OF_ONE_TENANT as error:
            if len(tenants) == 1:
                ours = isinstance(error, TollhouseError)
                if not ours:
                    log.exception("no invoice for %s", tenants[0])
                why = str(error) if ours else f"{type(error).__name__}: {error}"
                self.result.failed[tenants[0]] = why
                return
            for tenant_id in tenants:
                self.bill([tenant_id])

    def _one_each(self, period_ids: list[str], shown_credit: dict[str, int]) -> dict[str, int]:
        """Bill one period per tenant. `shown_credit` and the result are the picounits by grant that the
        drafts before and after this round show as used."""
        now = self.clock.now()

        def _build(
            session: Session, taxes: TaxService
        ) -> tuple[list[str], list[str], dict[str, int]]:
            builder = open_builder(session, period_ids, now, taxes)
            builder.shown_credit.update(shown_credit)
            ripe = [
                each
                for each in builder.periods
                if self.final
                and (builder.final_from(each) if self.grace else each.ends_at) <= now
                and each.id not in builder.organisations.waiting
            ]
            early = [each for each in builder.periods if each not in ripe]
            finalised = invoices.finalise_all(builder, ripe)
            drafted = invoices.draft_all(builder, early)
            ids = [each.id for each in finalised], [each.id for each in drafted]
            return *ids, builder.shown_credit

        finalised, drafted, shown_credit = with_taxes(self.database, self.clock, self.taxes, _build)
        self.result.finalised += self._new(finalised)
        self.result.drafted += self._new(drafted)
        return shown_credit

    def _new(self, ids: list[str]) -> list[str]:
        found = [each for each in ids if each not in self.seen]
        self.seen.update(found)
        return found


def due_periods(
    session: Session, tenant_ids: list[str], now: datetime, *, current: bool
) -> dict[str, list[str]]:
    """Ids of each tenant's open periods up to now, in order; creates periods without usage.
    Without `current`, only periods that have ended.
    """
    ensure_accounts(session, tenant_ids, now)
    accounts = lock_accounts(session, tenant_ids)
    periods = Periods(session)
    begins = _first_open(session, tenant_ids, now)
    periods.load(tenant_ids, min(begins.values(), default=now) - LONGEST)
    for tenant_id, account in accounts.items():
        at = begins.get(tenant_id, now)
        while at <= now:
            at = periods.around(account, at).ends_at
    session.flush()
    rows = session.execute(
        select(BillingPeriod.tenant_id, BillingPeriod.id)
        .where(
            BillingPeriod.tenant_id.in_(tenant_ids),
            BillingPeriod.closed_at.is_(None),
            (BillingPeriod.starts_at if current else BillingPeriod.ends_at) <= now,
        )
        .order_by(BillingPeriod.tenant_id, BillingPeriod.starts_at)
    )
    found: dict[str, list[str]] = {}
    for tenant_id, period_id in rows:
        found.setdefault(tenant_id, []).append(period_id)
    return found


def _first_open(session: Session, tenant_ids: list[str], now: datetime) -> dict[str, datetime]:
    """From when on each tenant's periods must exist without a gap: the end of its last closed period, or
    without one the start of its first period or subscription, or when it became a parent. A later
    period may exist before an earlier one: usage and changes of the calendar make theirs."""
    mine = BillingPeriod.tenant_id.in_(tenant_ids)
    closed = session.execute(
        select(BillingPeriod.tenant_id, func.max(BillingPeriod.ends_at))
        .where(mine, BillingPeriod.closed_at.is_not(None))
        .group_by(BillingPeriod.tenant_id)
    )
    first_open = session.execute(
        select(BillingPeriod.tenant_id, func.min(BillingPeriod.starts_at))
        .where(mine, BillingPeriod.closed_at.is_(None), BillingPeriod.starts_at <= now)
        .group_by(BillingPeriod.tenant_id)
    )
    first_plans = session.execute(
        select(Subscription.tenant_id, func.min(Subscription.starts_at))
        .where(Subscription.tenant_id.in_(tenant_ids))
        .group_by(Subscription.tenant_id)
    )
    found = organisations.parents_since(session, tenant_ids)
    for tenant_id, start in (*first_plans, *first_open):
        found[tenant_id] = min(start, found.get(tenant_id, start))
    return found | {row[0]: row[1] for row in closed}


def _recent(session: Session, tenant_ids: list[str], now: datetime) -> list[str]:
    return list(
        session.scalars(
            select(Invoice.id).where(
                Invoice.tenant_id.in_(tenant_ids),
                Invoice.status != invoices.DRAFT,
                Invoice.period_end > now - RECENT,
            )
        )
    )


def _everybody(database: Database) -> list[str]:
    with database.read() as session:
        return list(
            session.scalars(select(BillingAccount.tenant_id).order_by(BillingAccount.tenant_id))
        )
