"""JSON of plans and subscriptions for the API, the CLI and pages."""

from datetime import datetime
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session, aliased

from billing.models import BillingAccount, BillingPeriod, DailyUsage, Plan, Subscription
from billing.rollups import ADJUSTMENT
from billing.subscriptions import AMOUNTS, read_subscriptions, term_around
from billing.views import money


def plan_json(each: Plan) -> dict[str, Any]:
    names = (
        "id",
        "name",
        "currency",
        "interval",
        "in_advance",
        "trial_days",
        "included_seats",
        "grace_hours",
        "payment_terms_days",
        "suspend_after_days",
        "limits_plan",
    )
    shown = {name: getattr(each, name) for name in names}
    return shown | {name: money(getattr(each, name), each.currency) for name in AMOUNTS}


def subscriptions_json(session: Session, tenant_id: str, now: datetime) -> list[dict[str, Any]]:
    """The tenant's subscriptions, the earliest first."""
    account = session.get(BillingAccount, tenant_id)
    if account is None:
        return []
    held = read_subscriptions(session, [tenant_id]).get(tenant_id, [])
    return [_subscription(session, account, subscription, plan, now) for subscription, plan in held]


def _subscription(
    session: Session,
    account: BillingAccount,
    subscription: Subscription,
    plan: Plan,
    now: datetime,
) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "plan": plan.name,
        "interval": plan.interval,
        "in_advance": plan.in_advance,
        "seats": subscription.seats,
        "state": _state(subscription, now),
        "from": subscription.starts_at.isoformat(),
        "to": subscription.ends_at.isoformat() if subscription.ends_at else None,
        "fees_from": subscription.fees_from.isoformat(),
        "overrides": sorted(subscription.overrides),
    }
    shown |= {name: money(getattr(plan, name), plan.currency) for name in AMOUNTS}
    if plan.minimum_commitment and shown["state"] == "active":
        start, end = term_around(subscription, plan, account, max(now, subscription.fees_from))
        drawn = _used(session, account.tenant_id, max(start, subscription.fees_from), end)
        left = max(0, plan.minimum_commitment - drawn)
        shown["commitment"] = {
            "from": start.isoformat(),
            "to": end.isoformat(),
            "used": money(drawn, plan.currency),
            "left": money(left, plan.currency),
        }
    return shown


def _state(subscription: Subscription, now: datetime) -> str:
    if subscription.starts_at > now:
        return "paused"
    if subscription.ends_at is not None and subscription.ends_at <= now:
        return "ended"
    return "trial" if subscription.fees_from > now else "active"


def _used(session: Session, tenant_id: str, start: datetime, end: datetime) -> int:
    """Usage of the billing periods that end in the term, with corrections of what was used in it."""
    used_in = aliased(BillingPeriod)
    found = session.scalar(
        select(func.sum(DailyUsage.amount))
        .join(BillingPeriod, BillingPeriod.id == DailyUsage.bill_period_id)
        .join(used_in, used_in.id == DailyUsage.usage_period_id)
        .where(
            DailyUsage.tenant_id == tenant_id,
            or_(DailyUsage.kind != ADJUSTMENT, used_in.ends_at > start),
            BillingPeriod.ends_at > start,
            BillingPeriod.ends_at <= end,
        )
    )
    return int(found or 0)
