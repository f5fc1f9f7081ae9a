"""`service_tier` on the built-in engine: a place before or behind other requests, at a price of its own.

A tier is offered where a price for `<model>@<tier>` (or `*@<tier>`) is in force.
"""

from dataclasses import replace
from datetime import datetime
from functools import lru_cache

from billing.pricing.pricing import TIERS, PriceBook
from core.errors import UnsupportedParameter
from core.tenants.keys import Principal
from core.tenants.plans import BATCH_PRIORITY, Plan
from gateway.catalog.catalog import Target

_FIRST = 10  # above the priorities of plans, which end at 9


def in_tier(
    principal: Principal, target: Target, tier: str, book: PriceBook, at: datetime
) -> Principal:
    """The principal whose plan has the tier's priority; an upstream's model has its own tiers.
    Raises UnsupportedParameter for a tier without a price, and for lines of a batch."""
    model = target.model
    if model.parameters is not None:
        return principal
    if principal.plan.priority == BATCH_PRIORITY:
        raise _refused("A line of a batch has no service_tier: it runs after all other requests.")
    offered = tier in TIERS and book.pin_tier(
        principal.tenant_id, model.name, tier, at, principal.currency
    )
    if not offered:
        raise _refused(f"{model.name} has no service tier {tier[:80]!r}.")
    return replace(principal, plan=_in_tier(principal.plan, tier))


@lru_cache(maxsize=4096)
def _in_tier(plan: Plan, tier: str) -> Plan:
    return replace(plan, priority=_FIRST if tier == "priority" else BATCH_PRIORITY)


def _refused(problem: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        problem,
        next_step="Remove service_tier; an operator offers priority or flex by giving it a price.",
        param="service_tier",
    )
