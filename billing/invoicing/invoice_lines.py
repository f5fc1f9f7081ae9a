"""Exact lines of a period's invoice for usage, from the roll-ups, and adjustments."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from billing.accounts.tables import BillingPeriod
from billing.invoicing.invoice_inputs import InvoiceInputs
from billing.periods import days
from billing.pricing.pricing import TOKENS, UNIT_OF, Component
from billing.usage.daily_sums import KEY, SUMS, priced_sums
from core.events import UsageKind
from core.money import round_to_minor

_UNITS = {
    Component.REQUEST: "requests",
    Component.ADAPTER: "requests",
    Component.GPU_SECOND: "seconds",
    Component.MODERATION: "calls",
    Component.AUDIO_SECOND: "seconds",
    Component.IMAGE: "images",
    Component.CHARACTER: "characters",
    Component.SEARCH: "searches",
    Component.TOOL_CALL: "calls",
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
    Component.AUDIO_SECOND: "seconds of audio",
    Component.IMAGE: "images",
    Component.CHARACTER: "spoken characters",
    Component.CACHE_WRITE_5M: "input tokens written into a cache for five minutes",
    Component.CACHE_WRITE_1H: "input tokens written into a cache for an hour",
    Component.AUDIO_INPUT: "audio input tokens",
    Component.IMAGE_INPUT: "image input tokens",
    Component.REASONING: "reasoning tokens",
    Component.AUDIO_OUTPUT: "audio output tokens",
    Component.IMAGE_OUTPUT: "image output tokens",
    Component.SEARCH: "searches of the web",
    Component.TOOL_CALL: "calls of the provider's tools",
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
    unit_price: str = field(default="", compare=False)
    calculation: str = field(default="", compare=False)  # for a person to redo


def usage_lines(
    inputs: InvoiceInputs, period: BillingPeriod, currency: str, timezone: str = "UTC"
) -> list[Line]:
    found = []
    for row in inputs.usage.get(period.id, ()):
        project_id, model, adapter, kind, version, usage_period = (str(part) for part in row[:6])
        span = inputs.spans[usage_period]
        starts_at, ends_at = span.starts_at, span.ends_at
        late = usage_period != period.id
        sums = tuple(map(int, row[len(KEY) : len(KEY) + 2 * len(SUMS)]))
        if version in inputs.rates:
            sums = priced_sums(sums, inputs.rates[version])
        for index, (component, _, _) in enumerate(SUMS):
            quantity, exact = sums[2 * index], sums[2 * index + 1]
            if not _shown(component, kind, quantity, exact):
                continue
            name = f"{model}:{adapter}" if adapter else model
            text = f"{name}, {_NAMES[component]}"
            if kind == UsageKind.CACHE_HIT:
                text += " answered from the response cache"
            if version in inputs.tiers:
                text += f", {inputs.tiers[version]} tier"
            if late:
                text += f", late, used {days(starts_at, ends_at, timezone)}"
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
            inputs.spans[row.usage_period_id].starts_at,
            inputs.spans[row.usage_period_id].ends_at,
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


def _shown(component: Component, kind: str, quantity: int, exact: int) -> bool:
    if exact:
        return True
    if kind in UNIT_OF:
        return quantity > 0 and component is UNIT_OF[kind]
    if kind not in (UsageKind.GENERATION, UsageKind.EMBEDDING):
        return quantity > 0 and component not in TOKENS
    return quantity > 0 and component in TOKENS
