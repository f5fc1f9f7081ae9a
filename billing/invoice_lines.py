"""Exact lines of a period's invoice: usage from the roll-ups, adjustments and plan fees."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from billing.invoice_inputs import SUMS, InvoiceInputs
from billing.models import BillingPeriod
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


@dataclass(frozen=True, slots=True)
class Line:
    """`exact` is in picounits; `minor` is `exact` rounded to minor units."""

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


def build(inputs: InvoiceInputs, period: BillingPeriod, currency: str) -> list[Line]:
    """All lines of the period's invoice before credit and tax."""
    usage = usage_lines(inputs, period, currency)
    changes = adjustment_lines(inputs, period, currency)
    spent = sum(line.exact for line in usage + changes)
    held = inputs.subscriptions.get(period.tenant_id, ())
    parts = segments(held, period.starts_at, period.ends_at)
    return usage + changes + plan_lines(parts, period, spent, currency)


def usage_lines(inputs: InvoiceInputs, period: BillingPeriod, currency: str) -> list[Line]:
    found = []
    for row in inputs.usage.get(period.id, ()):
        project_id, model, adapter, kind, version, usage_period = (str(part) for part in row[:6])
        starts_at, ends_at = inputs.bounds[usage_period]
        late = usage_period != period.id
        for index, (component, _, _) in enumerate(SUMS):
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


def adjustment_lines(inputs: InvoiceInputs, period: BillingPeriod, currency: str) -> list[Line]:
    return [
        Line(
            "adjustment",
            row.reason,
            row.amount,
            round_to_minor(row.amount, currency)[0],
            *inputs.bounds[row.usage_period_id],
            component=row.component,
            project_id=row.project_id,
            model=row.model,
            usage_period_id=row.usage_period_id,
            quantity=row.quantity,
            unit=_UNITS.get(Component(row.component), "tokens") if row.component else "",
            details={"adjustment": row.id, "rerate": row.rerate_id},
        )
        for row in inputs.adjustments.get(period.id, ())
    ]


def plan_lines(
    parts: list[Segment], period: BillingPeriod, spent: int, currency: str
) -> list[Line]:
    """Fees and seats per segment; included usage and commitment over the whole period."""
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
        text = "Minimum commitment, shortfall"
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
