"""Plans, and the subscriptions of tenants to them, with seats; changes within a period are prorated."""

from calendar import monthrange
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from billing import entitlements
from billing.accounts import lock_account
from billing.models import AddOn, AddOnHolding, BillingAccount, Plan, Subscription
from billing.periods import period_around, zone_of
from core.errors import BadRequest, Conflict, NotFound
from core.ids import new_id
from core.tenants import plan_store

MONTH, YEAR = "month", "year"
AMOUNTS = ("base_fee", "seat_fee", "included_usage", "minimum_commitment")
Subscriptions = dict[str, list[tuple[Subscription, Plan]]]  # by tenant
AddOns = Sequence[tuple[AddOnHolding, AddOn]]


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
    subscription_id: int = 0

    def share(self, units: int) -> int:
        """This segment's share of a per-period amount. Shares that fill the period sum to it."""
        return units * self.end // self.whole - units * self.begin // self.whole


def create_plan(session: Session, now: datetime, fields: Mapping[str, Any]) -> Plan:
    """Store a plan; its amounts are in picounits. The transaction is lost if the name is taken."""
    for name in AMOUNTS:
        if fields.get(name, 0) < 0:
            raise BadRequest(
                f"{name} is negative.", next_step="Give an amount of at least 0.", param=name
            )
    if fields.get("limits_plan"):
        plan_store.find(session, fields["limits_plan"])
    created = Plan(id=new_id("plan"), created_at=now, **fields)
    session.add(created)
    try:
        session.flush()
    except IntegrityError:
        raise Conflict(
            f"A plan called {fields['name']!r} already exists.", next_step="Choose another name."
        ) from None
    return created


def subscribe(
    session: Session,
    tenant_id: str,
    plan_name: str,
    at: datetime,
    seats: int = 0,
    overrides: Mapping[str, int] | None = None,
) -> Subscription:
    """Put the tenant on the plan from `at` on; the current subscription ends there. `overrides` are
    amounts of this contract in picounits, in place of the plan's."""
    account = lock_account(session, tenant_id)
    plan = session.scalar(select(Plan).where(Plan.name == plan_name))
    if plan is None:
        raise NotFound(
            f"There is no plan {plan_name!r}.",
            next_step="Create it with `tollhouse tenant plan-add`.",
        )
    if plan.currency != account.currency:
        raise BadRequest(
            f"Plan {plan_name} is in {plan.currency}, the account in {account.currency}.",
            next_step=f"Choose a plan in {account.currency}.",
            code="currency_mismatch",
        )
    if seats < 0:
        raise BadRequest(f"seats is {seats}; it must not be negative.", param="seats")
    agreed = _checked_overrides(overrides or {})
    _refuse_other_interval(session, tenant_id, plan, at)
    held = _held(session, tenant_id)
    last = held[-1] if held else None
    if last is not None and last.starts_at >= at:
        raise Conflict(
            f"The latest subscription starts at {last.starts_at:%Y-%m-%d %H:%M} UTC.",
            next_step="Choose a later start.",
        )
    if last is not None and (last.ends_at is None or last.ends_at > at):
        last.ends_at = at
    billed_from = last.billed_from if last is not None else at + timedelta(days=plan.trial_days)
    created = Subscription(
        tenant_id=tenant_id,
        plan_id=plan.id,
        seats=seats,
        starts_at=at,
        billed_from=billed_from if billed_from is not None and billed_from > at else None,
        overrides=agreed,
    )
    session.add(created)
    session.flush()
    entitle(session, account, at)
    return created


def cancel(
    session: Session, tenant_id: str, now: datetime, *, at_term_end: bool = False
) -> Subscription:
    """End the subscription now, or where its current month or year ends. Fees paid in advance for
    later return with the next invoice."""
    account = lock_account(session, tenant_id)
    subscription = _running(session, tenant_id, now)
    subscription.ends_at = now
    if at_term_end:
        plan = session.get_one(Plan, subscription.plan_id)
        subscription.ends_at = term_around(subscription, plan, account, now)[1]
    for holding, _ in read_add_ons(session, [tenant_id]).get(tenant_id, []):
        if holding.ends_at is None or holding.ends_at > subscription.ends_at:
            holding.ends_at = max(subscription.ends_at, holding.starts_at)
    session.flush()
    entitle(session, account, now)
    return subscription


def pause(session: Session, tenant_id: str, now: datetime, until: datetime) -> Subscription:
    """End the subscription now and start it again on a date, where a new year begins."""
    account = lock_account(session, tenant_id)
    running = _running(session, tenant_id, now)
    if until <= now:
        raise BadRequest(
            f"The pause ends at {until:%Y-%m-%d %H:%M} UTC, which is past.", param="until"
        )
    plan = session.get_one(Plan, running.plan_id)
    running.ends_at = now
    session.flush()
    later = subscribe(session, tenant_id, plan.name, until, running.seats, running.overrides)
    entitle(session, account, now)
    return later


def resume(session: Session, tenant_id: str, now: datetime) -> Subscription:
    """Begin a paused subscription now."""
    account = lock_account(session, tenant_id)
    held = _held(session, tenant_id)
    if not held or held[-1].starts_at <= now:
        raise Conflict("No subscription is paused.", next_step="Subscribe the tenant to a plan.")
    held[-1].starts_at = now
    session.flush()
    entitle(session, account, now)
    return held[-1]


def entitle(session: Session, account: BillingAccount, now: datetime) -> bool:
    """Give the tenant the limits of the plan in force; whether they changed."""
    held = read_subscriptions(session, [account.tenant_id]).get(account.tenant_id, [])
    plan = plan_at(held, now)
    return entitlements.follow(session, account, plan.limits_plan if plan else None, now)


def tenants_with_limits(session: Session) -> list[str]:
    """Tenants whose limits follow a billing plan, or may from some day on."""
    following = select(BillingAccount.tenant_id).where(BillingAccount.limits_set.is_not(None))
    subscribed = (
        select(Subscription.tenant_id)
        .join(Plan, Plan.id == Subscription.plan_id)
        .where(Plan.limits_plan.is_not(None))
    )
    return sorted(set(session.scalars(following)) | set(session.scalars(subscribed)))


def term_around(
    subscription: Subscription, plan: Plan, account: BillingAccount, at: datetime
) -> tuple[datetime, datetime]:
    """The billing period or contract year around `at`."""
    if plan.interval == MONTH:
        return period_around(at, account.anchor_day, account.timezone)
    number = 0
    while anniversary(subscription.fees_from, number + 1, account.timezone) <= at:
        number += 1
    bounds = (
        anniversary(subscription.fees_from, n, account.timezone) for n in (number, number + 1)
    )
    return next(bounds), next(bounds)


def anniversary(start: datetime, years: int, timezone: str) -> datetime:
    """The same local time years later; February 29 becomes February 28."""
    local = start.astimezone(zone_of(timezone))
    day = min(local.day, monthrange(local.year + years, local.month)[1])
    return local.replace(year=local.year + years, day=day).astimezone(UTC)


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
        found[subscription.tenant_id].append((subscription, _as_agreed(subscription, plan)))
    return found


def read_add_ons(session: Session, tenant_ids: Iterable[str]) -> dict[str, AddOns]:
    """Add-ons of each tenant, ordered by start."""
    rows = session.execute(
        select(AddOnHolding, AddOn)
        .join(AddOn, AddOn.id == AddOnHolding.add_on_id)
        .where(AddOnHolding.tenant_id.in_(set(tenant_ids)))
        .order_by(AddOnHolding.tenant_id, AddOnHolding.starts_at, AddOnHolding.id)
    )
    found: dict[str, list[tuple[AddOnHolding, AddOn]]] = defaultdict(list)
    for holding, add_on in rows:
        found[holding.tenant_id].append((holding, add_on))
    return dict(found)


def running_plan(session: Session, tenant_id: str, now: datetime) -> Plan:
    """NotFound without a subscription."""
    return session.get_one(Plan, _running(session, tenant_id, now).plan_id)


def segment(
    subscription: Subscription,
    plan: Plan,
    owed: tuple[datetime, datetime],
    bounds: tuple[datetime, datetime],
) -> Segment | None:
    """What of a period lies in the time in which fees are owed."""
    starts_at, ends_at = bounds
    start, end = max(starts_at, owed[0]), min(ends_at, owed[1])
    if start >= end:
        return None
    offsets = (_micros(start - starts_at), _micros(end - starts_at))
    whole = _micros(ends_at - starts_at)
    return Segment(plan, subscription.seats, start, end, *offsets, whole, subscription.id)


def segments(
    held: Sequence[tuple[Subscription, Plan]],
    starts_at: datetime,
    ends_at: datetime,
    *,
    with_trial: bool = True,
) -> list[Segment]:
    """The segments of a period, in order; time without a subscription has none."""
    found = []
    for subscription, plan in held:
        begins = subscription.starts_at if with_trial else subscription.fees_from
        owed = begins, subscription.ends_at or ends_at
        part = segment(subscription, plan, owed, (starts_at, ends_at))
        if part is not None:
            found.append(part)
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


def _held(session: Session, tenant_id: str) -> list[Subscription]:
    rows = select(Subscription).where(Subscription.tenant_id == tenant_id)
    return list(session.scalars(rows.order_by(Subscription.starts_at)))


def _running(session: Session, tenant_id: str, now: datetime) -> Subscription:
    for each in _held(session, tenant_id):
        if each.starts_at <= now and (each.ends_at is None or each.ends_at > now):
            return each
    raise NotFound(
        f"Tenant {tenant_id} has no subscription now.", next_step="Subscribe it to a plan first."
    )


def _refuse_other_interval(session: Session, tenant_id: str, plan: Plan, at: datetime) -> None:
    """Add-ons are billed with the plan, by its interval."""
    for holding, add_on in read_add_ons(session, [tenant_id]).get(tenant_id, []):
        runs = holding.ends_at is None or holding.ends_at > at
        if runs and add_on.interval != plan.interval:
            raise Conflict(
                f"Add-on {add_on.name} is by the {add_on.interval}, the plan {plan.name} by the "
                f"{plan.interval}.",
                next_step="Remove the add-on first.",
            )


def _checked_overrides(given: Mapping[str, int]) -> dict[str, int]:
    for name, units in given.items():
        if name not in AMOUNTS or units < 0:
            raise BadRequest(
                f"{name!r} with {units} picounits cannot be agreed in a contract.",
                next_step=f"Give amounts of at least 0 for {', '.join(AMOUNTS)}.",
                param="overrides",
            )
    return dict(given)


def _as_agreed(subscription: Subscription, plan: Plan) -> Plan:
    """The plan with the amounts of the contract; not part of the session."""
    if not subscription.overrides:
        return plan
    columns = {column.key: getattr(plan, column.key) for column in Plan.__table__.columns}
    return Plan(**(columns | {name: int(units) for name, units in subscription.overrides.items()}))
