"""Subscriptions of tenants to plans, with seats; changes within a period are prorated."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts import lock_account
from billing.models import Plan, Subscription
from core.errors import BadRequest, Conflict, NotFound

Subscriptions = dict[str, list[tuple[Subscription, Plan]]]  # by tenant


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a period on one plan with a constant number of seats."""

    plan: Plan
    seats: int
    starts_at: datetime
    ends_at: datetime
    begin: int  # microseconds after the start of the period
    end: int
    whole: int  # microseconds of the period

    def share(self, units: int) -> int:
        """This segment's share of a per-period amount. Shares that fill the period sum to it."""
        return units * self.end // self.whole - units * self.begin // self.whole


def subscribe(
    session: Session, tenant_id: str, plan_name: str, at: datetime, seats: int = 0
) -> Subscription:
    """Put the tenant on the plan from `at` on; the current subscription ends there."""
    account = lock_account(session, tenant_id)
    plan = session.scalar(select(Plan).where(Plan.name == plan_name))
    if plan is None:
        raise NotFound(f"There is no plan {plan_name!r}.", next_step="Create the plan first.")
    if plan.currency != account.currency:
        raise BadRequest(
            f"Plan {plan_name} is in {plan.currency}, the account in {account.currency}.",
            next_step=f"Choose a plan in {account.currency}.",
            code="currency_mismatch",
        )
    if seats < 0:
        raise BadRequest(f"seats is {seats}; it must not be negative.", param="seats")
    current = _current(session, tenant_id)
    if current is not None and current.starts_at >= at:
        raise Conflict(
            f"The current subscription starts at {current.starts_at:%Y-%m-%d %H:%M} UTC.",
            next_step="Choose a later start.",
        )
    if current is not None:
        current.ends_at = at
    created = Subscription(tenant_id=tenant_id, plan_id=plan.id, seats=seats, starts_at=at)
    session.add(created)
    session.flush()
    return created


def read_subscriptions(session: Session, tenant_ids: Iterable[str]) -> Subscriptions:
    """Subscriptions of each tenant, ordered by start."""
    rows = session.execute(
        select(Subscription, Plan)
        .join(Plan, Plan.id == Subscription.plan_id)
        .where(Subscription.tenant_id.in_(set(tenant_ids)))
        .order_by(Subscription.tenant_id, Subscription.starts_at)
    )
    found: Subscriptions = defaultdict(list)
    for subscription, plan in rows:
        found[subscription.tenant_id].append((subscription, plan))
    return found


def segments(
    held: Sequence[tuple[Subscription, Plan]], starts_at: datetime, ends_at: datetime
) -> list[Segment]:
    """The segments of a period, in order; time without a subscription has none."""
    found = []
    for subscription, plan in held:
        start = max(starts_at, subscription.starts_at)
        end = min(ends_at, subscription.ends_at or ends_at)
        if start < end:
            offsets = (_micros(start - starts_at), _micros(end - starts_at))
            whole = _micros(ends_at - starts_at)
            found.append(Segment(plan, subscription.seats, start, end, *offsets, whole))
    return found


def plan_at(held: Sequence[tuple[Subscription, Plan]], at: datetime) -> Plan | None:
    for subscription, plan in held:
        if subscription.starts_at <= at and (
            subscription.ends_at is None or subscription.ends_at > at
        ):
            return plan
    return None


def _micros(span: timedelta) -> int:
    return span // timedelta(microseconds=1)


def _current(session: Session, tenant_id: str) -> Subscription | None:
    return session.scalar(
        select(Subscription).where(
            Subscription.tenant_id == tenant_id, Subscription.ends_at.is_(None)
        )
    )
