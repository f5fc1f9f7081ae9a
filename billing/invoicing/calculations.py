"""How the amount of a line comes about, in figures that a person can redo: quantity, unit price and
share of time.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.invoicing.tables import InvoiceLine
from billing.pricing import price_terms
from billing.pricing.pricing import PER_MILLION, PPM, Component, Rate, Scheme
from billing.pricing.tables import PriceVersionRow
from core.money import decimal_of

_MICRO = timedelta(microseconds=1)
_DAY = timedelta(days=1) // _MICRO
_SECOND = 10**6


def of_time(part: int, whole: int) -> str:
    """A share of time in microseconds: in days where both are whole days, in seconds otherwise."""
    if part == whole:
        return ""
    if part % _DAY == 0 and whole % _DAY == 0:
        return f" × {part // _DAY} of {whole // _DAY} days"
    return f" × {_seconds(part)} of {_seconds(whole)} s"


def _seconds(micros: int) -> str:
    whole, rest = divmod(micros, _SECOND)
    return f"{whole}.{rest:06d}".rstrip("0") if rest else str(whole)


def of_fee(units: int, quantity: int, interval: str, part: int, whole: int) -> str:
    each, rest = divmod(units, quantity) if quantity else (units, 0)
    if rest:
        each, quantity = units, 1
    return f"{quantity} × {decimal_of(each)} a {interval}{of_time(part, whole)}"


def versions_of(session: Session, lines: Iterable[InvoiceLine]) -> dict[str, PriceVersionRow]:
    ids = {line.price_version for line in lines if line.price_version}
    rows = session.scalars(select(PriceVersionRow).where(PriceVersionRow.id.in_(ids)))
    return {row.id: row for row in rows}


def explained(line: InvoiceLine, versions: dict[str, PriceVersionRow]) -> tuple[str, str]:
    """The unit price of a line and its calculation; empty where a line has none."""
    written: dict[str, Any] = line.details or {}
    row = versions.get(line.price_version)
    if row is None or not line.component:
        return str(written.get("unit_price", "")), str(written.get("calculation", ""))
    rates, discount_ppm = price_terms.load(row.terms)
    component = Component(line.component)
    rate = rates.get(component)
    if rate is None:
        return "", "not priced"
    less = f" less {decimal_of(discount_ppm * 10**12 * 100 // PPM)} %" if discount_ppm else ""
    if not rate.is_linear:
        return _tiers(rate, component) + less, (
            "tiers, packages and free units count all usage of the model in the period"
        )
    price = _priced(rate.tiers[0].unit, component)
    return price + less, f"{line.quantity:,} × {price}{less} = {decimal_of(line.exact)}"


def _priced(unit: int, component: Component) -> str:
    if component in PER_MILLION:
        return f"{decimal_of(unit * PPM)} per 1,000,000"
    return decimal_of(unit)


def _tiers(rate: Rate, component: Component) -> str:
    free = f"{rate.free:,} free, then " if rate.free else ""
    if rate.scheme is Scheme.PACKAGE:
        return f"{free}{decimal_of(rate.tiers[0].unit)} per started {rate.package:,}"
    if rate.scheme is Scheme.FLAT:
        return free + _priced(rate.tiers[0].unit, component)
    parts = []
    for tier in rate.tiers:
        upto = f"to {tier.up_to:,}" if tier.up_to is not None else "above"
        flat = f" and {decimal_of(tier.flat)} once" if tier.flat else ""
        parts.append(f"{upto}: {_priced(tier.unit, component)}{flat}")
    return f"{free}{rate.scheme.value}, " + "; ".join(parts)
