"""JSON of plans and subscriptions for the API, the CLI and pages."""

from datetime import datetime
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session, aliased

from billing.accounts.tables import BillingAccount, BillingPeriod
from billing.amounts import money
from billing.invoicing.invoices import VOID
from billing.invoicing.tables import Invoice
from billing.subscriptions.subscriptions import AMOUNTS, committed_around, read_subscriptions
from billing.subscriptions.tables import Plan, Subscription
from billing.usage.rollups import ADJUSTMENT
from billing.usage.tables import DailyUsage


def plan_json(each: Plan) -> dict[str, Any]:
    names = (
        "id",
        "name",
        "currency",
        "interval",
        "in_advance",
        "commitment_interval",
        "trial_days",
        "included_seats",
        "grace_hours",
        "payment_terms_days",
        "suspend_after_days",
        "limits_plan",
    )
    shown = {name: getattr(each, name) for name in names}
    shown["commitment_interval"] = each.committed_by
    return shown | {name: money(getattr(each, name), each.currency) for name in AMOUNTS}


def subscriptions_json(session: Session, tenant_id: str, now: datetime) -> list[dict[str, Any]]:
    """The tenant's subscriptions, the earliest first."""
    account = session.get(BillingAccount, tenant_id)
    if account is None:
        return []
    held = read_subscriptions(session, [tenant_id]).get(tenant_id, [])
    found = []
    before: Subscription | None = None
    for subscription, plan in held:
        follows = before is not None and before.ends_at == subscription.starts_at
        state = _state(subscription, now, first=before is None or follows)
        found.append(_subscription(session, account, (subscription, plan), state, now))
        before = subscription
    return found


def _subscription(
    session: Session,
    account: BillingAccount,
    held: tuple[Subscription, Plan],
    state: str,
    now: datetime,
) -> dict[str, Any]:
    subscription, plan = held
    shown: dict[str, Any] = {
        "plan": plan.name,
        "interval": plan.interval,
        "in_advance": plan.in_advance,
        "seats": subscription.seats,
        "state": state,
        "from": subscription.starts_at.isoformat(),
        "to": subscription.ends_at.isoformat() if subscription.ends_at else None,
        "fees_from": subscription.fees_from.isoformat(),
        "overrides": sorted(subscription.overrides),
    }
    shown |= {name: money(getattr(plan, name), plan.currency) for name in AMOUNTS}
    if plan.minimum_commitment and shown["state"] == "active":
        at = max(now, subscription.fees_from)
        start, end = committed_around(session, held, account, at)
        drawn = _used(session, account.tenant_id, max(start, subscription.years_from), end)
        left = max(0, plan.minimum_commitment - drawn)
        shown["commitment"] = {
            "from": start.isoformat(),
            "to": end.isoformat(),
            "used": money(drawn, plan.currency),
            "left": money(left, plan.currency),
        }
    return shown


def _state(subscription: Subscription, now: datetime, *, first: bool) -> str:
    ends_at = subscription.ends_at
    if ends_at is not None and (ends_at <= now or ends_at <= subscription.starts_at):
        return "ended"
    if subscription.starts_at > now:
        return "scheduled" if first else "paused"
    return "trial" if subscription.fees_from > now else "active"


def _used(session: Session, tenant_id: str, start: datetime, end: datetime) -> int:
    """Usage of the billing periods that end in the term, with corrections of what was used in it; of a
    void invoice nothing."""
    used_in = aliased(BillingPeriod)
    void = select(Invoice.period_id).where(Invoice.tenant_id == tenant_id, Invoice.status == VOID)
    found = session.scalar(
        select(func.sum(DailyUsage.amount))
        .join(BillingPeriod, BillingPeriod.id == DailyUsage.bill_period_id)
        .join(used_in, used_in.id == DailyUsage.usage_period_id)
        .where(
            DailyUsage.tenant_id == tenant_id,
            or_(DailyUsage.kind != ADJUSTMENT, used_in.ends_at > start),
            BillingPeriod.ends_at > start,
            BillingPeriod.ends_at <= end,
            BillingPeriod.id.not_in(void),
        )
    )
    return int(found or 0)
