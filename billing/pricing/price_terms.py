"""The written form of a price: parsing, and validation on sample quantities.

Prices are decimals of the major unit, per million tokens or characters or per single unit of other
components:
    {"input": "0.15", "output": {"scheme": "graduated", "free": 1000,
     "tiers": [{"up_to": 1000000, "price": "0.60"}, {"up_to": null, "price": "0.40"}]}}
Rates are stored in whole picounits per unit.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from billing.pricing.pricing import (
    MAX_COUNT,
    PER_MILLION,
    PPM,
    Component,
    PriceVersion,
    Rate,
    Scheme,
    Tier,
)
from core.errors import BadRequest
from core.money import MINOR_DIGITS, PICO, decimal_of, units_of

# A higher price per million tokens is taken for a wrong unit.
MAX_PRICE_PER_MILLION = 10_000 * PICO
MAX_PRICE_PER_UNIT = 100_000 * PICO
_MILLION = 1_000_000
_SAMPLES = (0, 1, 2, 999, 1_000, 1_001, 50_000, _MILLION, _MILLION + 1, 75_000_000, 3_000_000_000)


def parse(written: dict[str, Any]) -> MappingProxyType[Component, Rate]:
    """Rates from the written form; BadRequest names the component and what is wrong with it."""
    rates: dict[Component, Rate] = {}
    for name, value in written.items():
        try:
            component = Component(name)
        except ValueError:
            known = ", ".join(Component)
            raise _invalid(f"{name!r} is not a component", f"use one of {known}") from None
        try:
            rates[component] = _rate(component, value)
        except (ValueError, TypeError, KeyError) as error:
            raise _invalid(f"price of {name}: {error}", "correct it and save again") from None
    if not rates:
        raise _invalid("the price has no component", "give at least one of input, output, request")
    return MappingProxyType(rates)


def check(version: PriceVersion) -> None:
    """Validate the version on samples: prices are plausible, rise with use, and fit the hold."""
    if version.currency not in MINOR_DIGITS:
        raise _invalid(
            f"currency {version.currency!r} is not known", f"use one of {', '.join(MINOR_DIGITS)}"
        )
    if not 0 <= version.discount_ppm <= PPM:
        raise _invalid(
            f"the discount is {version.discount_ppm / 10_000:g} percent",
            "choose a discount of 0 to 100 percent",
        )
    for component, rate in version.rates.items():
        problem = _problem(component, rate)
        if problem:
            raise _invalid(f"price of {component}: {problem}", "correct it and save again")
        for before in _SAMPLES:
            for quantity in _SAMPLES:
                _check_sample(version, component, rate, before, quantity)


def dump(rates: MappingProxyType[Component, Rate], discount_ppm: int) -> dict[str, Any]:
    """The stored form."""
    return {
        "discount_ppm": discount_ppm,
        "rates": {
            component.value: {
                "scheme": rate.scheme.value,
                "tiers": [[tier.up_to, tier.unit, tier.flat] for tier in rate.tiers],
                "package": rate.package,
                "free": rate.free,
            }
            for component, rate in rates.items()
        },
    }


def written(rates: Mapping[Component, Rate]) -> dict[str, Any]:
    """The written form of stored rates: `parse` gives the same rates again."""
    return {each.value: _written(each, rates[each]) for each in Component if each in rates}


def _written(component: Component, rate: Rate) -> Any:
    per = _MILLION if component in PER_MILLION else 1
    free = {"free": rate.free} if rate.free else {}
    if rate.scheme is Scheme.PACKAGE:
        size = {"price": decimal_of(rate.tiers[0].unit), "size": rate.package}
        return {"scheme": rate.scheme.value, **size, **free}
    if rate.scheme is Scheme.FLAT:
        price = decimal_of(rate.tiers[0].unit * per)
        return {"scheme": rate.scheme.value, "price": price, **free} if free else price
    tiers = [
        {"up_to": tier.up_to, "price": decimal_of(tier.unit * per), "flat": decimal_of(tier.flat)}
        for tier in rate.tiers
    ]
    return {"scheme": rate.scheme.value, "tiers": tiers, **free}


def in_words(component: Component, rate: Rate) -> str:
    """As a person reads it, in the units of the written form: `5 up to 10 (and 0.5 once), then 2`."""
    per = _MILLION if component in PER_MILLION else 1
    if rate.scheme is Scheme.PACKAGE:
        text = f"{decimal_of(rate.tiers[0].unit)} for each {rate.package:,} begun"
    else:
        parts = []
        for tier in rate.tiers:
            part = decimal_of(tier.unit * per)
            if tier.up_to is not None:
                part += f" up to {tier.up_to:,}"
            if tier.flat:
                part += f" (and {decimal_of(tier.flat)} once)"
            parts.append(part)
        text = ", then ".join(parts)
        if rate.scheme is Scheme.VOLUME:
            text += "; the tier of the whole quantity prices all of it"
    return f"{rate.free:,} free, then {text}" if rate.free else text


def load(stored: dict[str, Any]) -> tuple[MappingProxyType[Component, Rate], int]:
    rates = {
        Component(name): Rate(
            Scheme(rate["scheme"]),
            tuple(Tier(*tier) for tier in rate["tiers"]),
            rate["package"],
            rate["free"],
        )
        for name, rate in stored["rates"].items()
    }
    return MappingProxyType(rates), int(stored["discount_ppm"])


def _rate(component: Component, value: Any) -> Rate:
    if not isinstance(value, dict):
        return Rate(Scheme.FLAT, (Tier(None, _unit(component, value)),))
    unknown = set(value) - {"scheme", "price", "tiers", "size", "free"}
    if unknown:
        raise ValueError(f"unknown field {', '.join(sorted(unknown))}")
    try:
        scheme = Scheme(value.get("scheme", "flat"))
    except ValueError:
        raise ValueError(
            f"scheme is {value['scheme']!r}; it must be one of {', '.join(Scheme)}"
        ) from None
    free = _whole(value.get("free", 0), "free")
    if scheme is Scheme.FLAT:
        return Rate(scheme, (Tier(None, _unit(component, value["price"])),), 1, free)
    if scheme is Scheme.PACKAGE:
        size = _whole(value["size"], "size")
        return Rate(scheme, (Tier(None, units_of(str(value["price"]))),), size, free)
    return Rate(scheme, tuple(_tier(component, tier) for tier in value["tiers"]), 1, free)


def _tier(component: Component, written: dict[str, Any]) -> Tier:
    up_to = written.get("up_to")
    return Tier(
        None if up_to is None else _whole(up_to, "up_to"),
        _unit(component, written["price"]),
        units_of(str(written.get("flat", "0"))),
    )


def _unit(component: Component, price: Any) -> int:
    if isinstance(price, float):
        raise TypeError("write the price as a string; money is never a float")
    units = units_of(str(price))
    if component not in PER_MILLION:
        return units
    if units % _MILLION:
        raise ValueError(f"{price} per million tokens has more than six decimals")
    return units // _MILLION


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of units, zero or more")
    if value > MAX_COUNT:
        raise ValueError(f"{name} is {value}; it must be at most {MAX_COUNT}")
    return value


def _problem(component: Component, rate: Rate) -> str | None:
    """What is wrong with a rate; None if nothing is."""
    highest = MAX_PRICE_PER_MILLION // _MILLION if component in PER_MILLION else MAX_PRICE_PER_UNIT
    if any(tier.unit < 0 or tier.flat < 0 for tier in rate.tiers):
        return "it is negative; use a discount or credit instead"
    if rate.scheme is Scheme.PACKAGE:
        if rate.package < 1:
            return "the package size must be at least one unit"
        per_package = MAX_PRICE_PER_MILLION if component in PER_MILLION else MAX_PRICE_PER_UNIT
        highest = min(MAX_PRICE_PER_UNIT, max(per_package, highest * rate.package))
    if any(tier.unit > highest for tier in rate.tiers):
        return "it is implausibly high; check the unit that the price is for"
    if any(tier.flat > MAX_PRICE_PER_UNIT for tier in rate.tiers):
        return "its flat part is implausibly high; check the currency and the decimal point"
    if rate.scheme is Scheme.PACKAGE:
        return None
    bounds = [tier.up_to for tier in rate.tiers]
    if not bounds or bounds[-1] is not None:
        return "the tiers leave a gap above the last up_to, which must be null"
    below = 0
    for bound in bounds[:-1]:
        if bound is None or bound <= below:
            return f"the tiers overlap or leave a gap at {bound}; each up_to must exceed the one before"
        below = bound
    if rate.scheme is Scheme.VOLUME:
        units = [tier.unit for tier in rate.tiers]
        if units != sorted(units, reverse=True) or any(tier.flat for tier in rate.tiers):
            return (
                "volume tiers must fall in price and have no flat part: a more expensive tier would "
                "reprice all earlier usage, which no hold can cover"
            )
    return None


def _check_sample(
    version: PriceVersion, component: Component, rate: Rate, before: int, quantity: int
) -> None:
    cost = version.marginal(component, before, quantity)
    if cost < 0 and rate.scheme is not Scheme.VOLUME:
        raise _invalid(
            f"{quantity} more {component} after {before} cost {cost} units",
            "make the total price rise with the quantity",
        )
    if cost > rate.most(quantity):
        raise _invalid(
            f"{quantity} {component} after {before} cost {cost} units, more than the hold",
            "simplify the tiers",
        )


def _invalid(problem: str, next_step: str) -> BadRequest:
    return BadRequest(
        f"The price is invalid: {problem}.",
        next_step=f"{next_step[0].upper()}{next_step[1:]}.",
        code="price_refused",
    )
