"""SKUs and their prices: ids that stay the same over price versions, and what they are priced by.

A SKU is what is metered (`demo/input`) or sold (`plan/pro/seats`). A SKU price is one of its unit
prices: of a tier, of free units, of a package, of a service tier, of an adapter.
"""

from dataclasses import dataclass

from billing.exports.focus.tier_parts import Point
from billing.exports.focus.units import BLOCK, METERS
from billing.pricing.pricing import PPM, Component, PriceVersion, tier_of
from billing.subscriptions.tables import AddOn, Plan
from core.money import PICO, round_half_away

_TERMS = {"month": "Months", "year": "Years"}
Details = tuple[tuple[str, str | bool], ...]


@dataclass(frozen=True, slots=True)
class Sku:
    """`details` have the names of FOCUS 1.5, `own_details` are those that it has no name for."""

    id: str
    price_id: str
    meter: str
    consumed_unit: str
    pricing_unit: str
    block: int = 1  # units of the price
    details: Details = ()
    own_details: Details = ()


@dataclass(frozen=True, slots=True)
class UnitPrices:
    """Picounits for one pricing unit, before and after the discount; quantities are in 10^-12."""

    listed: int
    contracted: int

    def cost(self, quantity: int) -> int:
        return round_half_away(self.contracted * quantity, PICO)

    def list_cost(self, quantity: int) -> int:
        return round_half_away(self.listed * quantity, PICO)


def of_usage(
    model: str, adapter: str, component: Component, version: PriceVersion | None, point: Point
) -> Sku:
    meter = METERS[component]
    name = f"{model}:{adapter}" if adapter else model
    tail = point.name
    if version is not None and (tier := tier_of(version.model)):
        tail = f"{tier}/{point.name}"
    block = point.package if point.package > 1 else meter.block(component)
    unit = meter.unit if block == 1 else f"{block} {meter.unit}"
    if not point.counted:
        block, unit = 1, "Tiers"
    return Sku(
        f"{model}/{component.value}",
        f"{name}/{component.value}/{tail}",
        meter.name,
        meter.unit,
        unit,
        block,
        (("ModelId", model), *meter.details),
        (*((("AdapterId", adapter),) if adapter else ()), *meter.own_details),
    )


def of_plan(plan: Plan, what: str) -> Sku:
    """`what` is base-fee or seats."""
    term = _TERMS[plan.interval]
    sku = f"plan/{plan.name}/{what}"
    unit, meter = (f"Seat-{term}", "Seats") if what == "seats" else (term, "Plan Fee")
    return Sku(sku, f"{sku}/{plan.interval}", meter, unit, unit, 1, (), (("PlanName", plan.name),))


def of_add_on(add_on: AddOn) -> Sku:
    term = _TERMS[add_on.interval]
    sku = f"add-on/{add_on.name}"
    own = (("AddOnName", add_on.name),)
    return Sku(
        sku, f"{sku}/{add_on.interval}", "Add-on", f"Unit-{term}", f"Unit-{term}", 1, (), own
    )


def of_amount(sku: str, meter: str, currency: str) -> Sku:
    """What has no other measure than its amount: one pricing unit is one of the currency."""
    return Sku(sku, f"{sku}/{currency}", meter, currency, currency)


def unit_prices(
    component: Component, version: PriceVersion | None, point: Point, listed: int
) -> UnitPrices:
    """By pricing unit; `listed` is the list price for what `point` prices."""
    discount = version.discount_ppm if version is not None else 0
    block = BLOCK if METERS[component].block(component) == BLOCK else 1
    if point.package > 1 or not point.counted:
        block = 1
    return UnitPrices(listed * block, round_half_away(point.unit * block * (PPM - discount), PPM))
