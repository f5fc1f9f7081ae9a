"""The lines of a period's invoice, exact: usage from the roll-ups, adjustments, and the plan's fees."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.models import Adjustment, BillingPeriod, DailyUsage
from billing.pricing import TOKENS, Component
from billing.subscriptions import Segment, segments
from core.events import UsageKind
from core.money import round_to_minor

_UNITS = {
    Component.REQUEST: "requests",
    Component.ADAPTER: "requests",
    Component.GPU_SECOND: "seconds",
    Component.MODERATION: "calls",
}
_NAMES = {
    Component.INPUT: "input tokens",
    Component.CACHED_INPUT: "cached input tokens",
    Component.OUTPUT: "output tokens",
    Component.WAIVED: "tokens generated but not delivered",
    Component.REQUEST: "requests",
    Component.ADAPTER: "requests with an adapter",
    Component.GPU_SECOND: "dedicated GPU seconds",
    Component.MODERATION: "moderation calls",
}
_D = DailyUsage
_KEY = (_D.project_id, _D.model, _D.adapter, _D.kind, _D.price_version, _D.usage_period_id)
_SUMS = (
    (Component.INPUT, _D.input_tokens - _D.cached_tokens, _D.input_amount),
    (Component.CACHED_INPUT, _D.cached_tokens, _D.cached_amount),
    (Component.OUTPUT, _D.output_tokens, _D.output_amount),
    (Component.WAIVED, _D.waived_tokens, _D.waived_amount),
    (Component.REQUEST, _D.requests, _D.request_amount),
    (Component.ADAPTER, _D.adapter_requests, _D.adapter_amount),
    (Component.GPU_SECOND, _D.gpu_seconds, _D.gpu_amount),
    (Component.MODERATION, _D.moderation_calls, _D.moderation_amount),
)


@dataclass(frozen=True, slots=True)
class Line:
    """`exact` picounits; `minor` is its one rounding."""

    kind: str
    description: str
    exact: int
    minor: int
    starts_at: datetime
    ends_at: datetime
    component: str = ""
    project_id: str = ""
    model: str = ""
    adapter: str = ""
    price_version: str = ""
    usage_period_id: str = ""
    quantity: int = 0
    unit: str = ""
    details: dict[str, Any] = field(default_factory=dict)


def build(session: Session, period: BillingPeriod, currency: str) -> list[Line]:
    """Everything that the period's invoice bills before credit and tax."""
    usage = usage_lines(session, period, currency)
    changes = adjustment_lines(session, period, currency)
    spent = sum(line.exact for line in usage + changes)
    parts = segments(session, period.tenant_id, period.starts_at, period.ends_at)
    return usage + changes + plan_lines(parts, period, spent, currency)


def usage_lines(session: Session, period: BillingPeriod, currency: str) -> list[Line]:
    columns = [func.sum(column) for _, count, amount in _SUMS for column in (count, amount)]
    rows = session.execute(
        select(*_KEY, *columns)
        .where(_D.bill_period_id == period.id)
        .group_by(*_KEY)
        .order_by(*_KEY)
    ).all()
    bounds = _bounds(session, {str(row[5]) for row in rows})
    found = []
    for row in rows:
        project_id, model, adapter, kind, version, usage_period = (str(part) for part in row[:6])
        starts_at, ends_at = bounds[usage_period]
        late = usage_period != period.id
        for index, (component, _, _) in enumerate(_SUMS):
            quantity, exact = int(row[6 + 2 * index]), int(row[7 + 2 * index])
            if not _shown(component, kind, quantity, exact):
                continue
            name = f"{model}:{adapter}" if adapter else model
            text = f"{name}, {_NAMES[component]}"
            if late:
                text += f", late, used {starts_at:%Y-%m-%d} to {ends_at:%Y-%m-%d}"
            found.append(
                Line(
                    "late_usage" if late else "usage",
                    text,
                    exact,
                    round_to_minor(exact, currency)[0],
                    starts_at,
                    ends_at,
                    component.value,
                    project_id,
                    model,
                    adapter,
                    version,
                    usage_period,
                    quantity,
                    _UNITS.get(component, "tokens"),
                    {"kind": kind},
                )
            )
    return found


def adjustment_lines(session: Session, period: BillingPeriod, currency: str) -> list[Line]:
    rows = session.scalars(
        select(Adjustment).where(Adjustment.bill_period_id == period.id).order_by(Adjustment.id)
    ).all()
    bounds = _bounds(session, {row.usage_period_id for row in rows})
    return [
        Line(
            "adjustment",
            row.reason,
            row.amount,
            round_to_minor(row.amount, currency)[0],
            *bounds[row.usage_period_id],
            component=row.component,
            project_id=row.project_id,
            model=row.model,
            usage_period_id=row.usage_period_id,
            quantity=row.quantity,
            unit=_UNITS.get(Component(row.component), "tokens") if row.component else "",
            details={"adjustment": row.id, "rerate": row.rerate_id},
        )
        for row in rows
    ]


def plan_lines(
    parts: list[Segment], period: BillingPeriod, spent: int, currency: str
) -> list[Line]:
    """Fees and seats by segment; included usage and the commitment over the whole period."""
    found = []
    for part in parts:
        plan = part.plan
        partial = part.end - part.begin < part.whole
        share = f", {part.starts_at:%Y-%m-%d} to {part.ends_at:%Y-%m-%d}" if partial else ""
        extra = max(0, part.seats - plan.included_seats)
        for kind, units, count, text in (
            ("base_fee", plan.base_fee, 1, f"Plan {plan.name}"),
            ("seats", plan.seat_fee * extra, extra, f"Plan {plan.name}, {extra} seats"),
        ):
            if units:
                exact = part.share(units)
                found.append(_plan_line(kind, text + share, exact, currency, part, count))
    included = sum(part.share(part.plan.included_usage) for part in parts)
    covered = max(0, min(included, spent))
    if covered:
        found.append(
            _whole_line("included", "Usage included in the plan", -covered, currency, period)
        )
    committed = sum(part.share(part.plan.minimum_commitment) for part in parts)
    missing = committed - (spent - covered)
    if committed and missing > 0:
        text = "Minimum commitment, part that usage did not reach"
        found.append(_whole_line("commitment", text, missing, currency, period))
    return found


def _plan_line(kind: str, text: str, exact: int, currency: str, part: Segment, count: int) -> Line:
    minor = round_to_minor(exact, currency)[0]
    return Line(
        kind,
        text,
        exact,
        minor,
        part.starts_at,
        part.ends_at,
        quantity=count,
        unit="seats" if kind == "seats" else "plan",
        details={"plan": part.plan.id, "seats": part.seats},
    )


def _whole_line(kind: str, text: str, exact: int, currency: str, period: BillingPeriod) -> Line:
    minor = round_to_minor(exact, currency)[0]
    return Line(kind, text, exact, minor, period.starts_at, period.ends_at)


def _shown(component: Component, kind: str, quantity: int, exact: int) -> bool:
    if exact:
        return True
    if kind not in (UsageKind.GENERATION, UsageKind.EMBEDDING):
        return quantity > 0 and component not in TOKENS
    return quantity > 0 and component in TOKENS


def _bounds(session: Session, period_ids: set[str]) -> dict[str, tuple[datetime, datetime]]:
    rows = session.execute(
        select(BillingPeriod.id, BillingPeriod.starts_at, BillingPeriod.ends_at).where(
            BillingPeriod.id.in_(period_ids)
        )
    )
    return {row[0]: (row[1], row[2]) for row in rows}
