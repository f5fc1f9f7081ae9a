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

from billing.accounts.accounts import Periods, lock_account
from billing.accounts.tables import BillingAccount
from billing.periods import Span, zone_of
from billing.subscriptions import entitlements
from billing.subscriptions.tables import AddOn, AddOnHolding, Plan, Subscription
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
    begin: int  # microseconds after the start of the whole month
    end: int
    whole: int  # microseconds of the month; more than the period has after a change of its bounds
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
    *,
    now: datetime | None = None,
) -> Subscription:
    """Put the tenant on the plan from `at` on; the current subscription ends there. A later start than
    `now` waits. On the same plan (a change of seats) the end of the subscription, the years of the
    contract and its amounts stay; a subscription that waits for its start goes on waiting. `overrides`
    are amounts of this contract in picounits, in place of the plan's."""
    now = at if now is None else now
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
    running = _around(held, at)
    waiting = next((each for each in held if each.starts_at > now), None)
    if waiting is not None and (
        waiting.starts_at == at or (running is None and at <= waiting.starts_at)
    ):
        _begin(waiting, at if at > now else waiting.starts_at, plan, first=waiting is held[0])
        waiting.overrides = agreed or (waiting.overrides if waiting.plan_id == plan.id else {})
        waiting.plan_id, waiting.seats = plan.id, seats
        session.flush()
        return waiting
    last = running or (held[-1] if held else None)
    if last is not None and last.starts_at >= at:
        raise Conflict(
            f"The latest subscription starts at {last.starts_at:%Y-%m-%d %H:%M} UTC.",
            next_step="Choose a later start.",
        )
    created = Subscription(tenant_id=tenant_id, plan_id=plan.id, seats=seats, starts_at=at)
    billed_from = last.billed_from if last is not None else at + timedelta(days=plan.trial_days)
    created.billed_from = billed_from if billed_from is not None and billed_from > at else None
    created.overrides = agreed
    if running is not None:
        if running.plan_id == plan.id:
            created.ends_at, created.years_since = running.ends_at, running.years_from
            created.overrides = agreed or running.overrides
        running.ends_at = at
    following = next((each.starts_at for each in held if each.starts_at > at), None)
    if following is not None and (created.ends_at is None or created.ends_at > following):
        created.ends_at = following
    created = _store(session, created)
    entitle(session, account, now)
    return created


def cancel(
    session: Session, tenant_id: str, now: datetime, *, at_term_end: bool = False
) -> Subscription:
    """End the subscription now, or where its current month or year ends; one that is paused or waits
    for its start does not begin. Fees paid in advance for later return with the next invoice."""
    account = lock_account(session, tenant_id)
    held = _held(session, tenant_id)
    waiting = [each for each in held if each.starts_at > now]
    subscription = _around(held, now)
    if subscription is None:
        if not waiting:
            raise _none_now(tenant_id)
        subscription = waiting[0]
        subscription.ends_at = subscription.starts_at
    else:
        end = now
        if at_term_end:
            plan = session.get_one(Plan, subscription.plan_id)
            end = term_around(session, (subscription, plan), account, now)[1]
        subscription.ends_at = min(end, subscription.ends_at or end)
    for each in waiting:
        each.ends_at = each.starts_at
    for holding, _ in read_add_ons(session, [tenant_id]).get(tenant_id, []):
        if holding.ends_at is None or holding.ends_at > subscription.ends_at:
            holding.ends_at = max(subscription.ends_at, holding.starts_at)
    session.flush()
    entitle(session, account, now)
    return subscription


def pause(session: Session, tenant_id: str, now: datetime, until: datetime) -> Subscription:
    """End the subscription now and start it again on a date, where a new year begins. One that is
    cancelled to an earlier date does not start again."""
    account = lock_account(session, tenant_id)
    running = _running(session, tenant_id, now)
    if until <= now:
        raise BadRequest(
            f"The pause ends at {until:%Y-%m-%d %H:%M} UTC, which is past.", param="until"
        )
    last = running.ends_at
    running.ends_at = now
    later = running
    if last is None or until < last:
        later = Subscription(
            tenant_id=tenant_id,
            plan_id=running.plan_id,
            seats=running.seats,
            starts_at=until,
            ends_at=last,
            overrides=running.overrides,
        )
        if running.billed_from is not None and running.billed_from > until:
            later.billed_from = running.billed_from
        later = _store(session, later)
    else:
        for each in _held(session, tenant_id):
            if now < each.starts_at < until:
                each.starts_at, later = until, each
    session.flush()
    entitle(session, account, now)
    return later


def resume(session: Session, tenant_id: str, now: datetime) -> Subscription:
    """Begin a paused subscription now, or take back a cancellation to the term's end."""
    account = lock_account(session, tenant_id)
    held = _held(session, tenant_id)
    waiting = next((each for each in held if each.starts_at > now), None)
    running = _around(held, now)
    if waiting is not None:
        if running is not None:
            running.ends_at = now
        plan = session.get_one(Plan, waiting.plan_id)
        _begin(waiting, now, plan, first=waiting is held[0])
    elif running is not None and running.ends_at is not None:
        waiting = running
        for holding, _ in read_add_ons(session, [tenant_id]).get(tenant_id, []):
            if holding.starts_at < now and holding.ends_at == running.ends_at:
                holding.ends_at = None
        running.ends_at = None
    else:
        raise Conflict("No subscription is paused.", next_step="Subscribe the tenant to a plan.")
    session.flush()
    entitle(session, account, now)
    return waiting


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
    session: Session, held: tuple[Subscription, Plan], account: BillingAccount, at: datetime
) -> tuple[datetime, datetime]:
    """The billing period or contract year around `at`, by the interval of the fees. A period that
    began before a change of the anchor day or the time zone keeps its bounds."""
    return _term(session, (held[0], held[1].interval), account, at)


def committed_around(
    session: Session, held: tuple[Subscription, Plan], account: BillingAccount, at: datetime
) -> tuple[datetime, datetime]:
    """The same by the interval of the commitment."""
    return _term(session, (held[0], held[1].committed_by), account, at)


def _term(
    session: Session, term: tuple[Subscription, str], account: BillingAccount, at: datetime
) -> tuple[datetime, datetime]:
    subscription, interval = term
    if interval == MONTH:
        return Periods(session).bounds(account, at)

    first, number = subscription.years_from, 0
    while anniversary(first, number + 1, account.timezone) <= at:
        number += 1
    bounds = (anniversary(first, n, account.timezone) for n in (number, number + 1))
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
    subscription: Subscription, plan: Plan, owed: tuple[datetime, datetime], span: Span
) -> Segment | None:
    """What of a period lies in the time in which fees are owed."""
    start, end = max(span.starts_at, owed[0]), min(span.ends_at, owed[1])
    if start >= end:
        return None
    offsets = (_micros(start - span.whole_from), _micros(end - span.whole_from))
    whole = _micros(span.whole_to - span.whole_from)
    return Segment(plan, subscription.seats, start, end, *offsets, whole, subscription.id)


def segments(
    held: Sequence[tuple[Subscription, Plan]], span: Span, *, with_trial: bool = True
) -> list[Segment]:
    """The segments of a period, in order; time without a subscription has none."""
    found = []
    for subscription, plan in held:
        begins = subscription.starts_at if with_trial else subscription.fees_from
        owed = begins, subscription.ends_at or span.ends_at
        part = segment(subscription, plan, owed, span)
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


def latest_plan(held: Sequence[tuple[Subscription, Plan]], at: datetime) -> Plan | None:
    """The plan at this moment, or the last one before it."""
    begun = [
        plan
        for subscription, plan in held
        if subscription.starts_at <= at
        and (subscription.ends_at is None or subscription.ends_at > subscription.starts_at)
    ]
    return plan_at(held, at) or (begun[-1] if begun else None)


def _micros(span: timedelta) -> int:
    return span // timedelta(microseconds=1)


def _held(session: Session, tenant_id: str) -> list[Subscription]:
    """In order, without those that were cancelled before they began."""
    rows = select(Subscription).where(Subscription.tenant_id == tenant_id)
    found = session.scalars(rows.order_by(Subscription.starts_at))
    return [each for each in found if each.ends_at is None or each.ends_at > each.starts_at]


def _around(held: Sequence[Subscription], at: datetime) -> Subscription | None:
    for each in held:
        if each.starts_at <= at and (each.ends_at is None or each.ends_at > at):
            return each
    return None


def _running(session: Session, tenant_id: str, now: datetime) -> Subscription:
    found = _around(_held(session, tenant_id), now)
    if found is None:
        raise _none_now(tenant_id)
    return found


def _none_now(tenant_id: str) -> NotFound:
    return NotFound(
        f"Tenant {tenant_id} has no subscription now.", next_step="Subscribe it to a plan first."
    )


def _store(session: Session, created: Subscription) -> Subscription:
    """In place of one that was to begin at the same moment and was cancelled: its row stays, because
    fees may have been billed ahead for it."""
    session.flush()
    known = session.scalar(
        select(Subscription).where(
            Subscription.tenant_id == created.tenant_id,
            Subscription.starts_at == created.starts_at,
        )
    )
    if known is None:
        session.add(created)
        session.flush()
        return created
    for name in ("plan_id", "seats", "ends_at", "billed_from", "overrides", "years_since"):
        setattr(known, name, getattr(created, name))
    session.flush()
    return known


def _begin(waiting: Subscription, at: datetime, plan: Plan, *, first: bool) -> None:
    """Move the start of one that has not begun; the trial of a tenant's first one moves with it."""
    waiting.starts_at = at
    if first:
        trial_end = at + timedelta(days=plan.trial_days)
        waiting.billed_from = trial_end if trial_end > at else None


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
