"""The list price of usage that was billed at a tenant's own price, for the columns ListUnitPrice and
ListCost.
"""

from dataclasses import dataclass, field
from datetime import datetime

from billing.invoicing.tables import InvoiceLine
from billing.pricing.pricing import PPM, Component, PriceBook, PriceVersion
from core.errors import NotFound


@dataclass(slots=True)
class ListPrices:
    book: PriceBook
    _listed: dict[tuple[str, str, datetime, str], PriceVersion | None] = field(default_factory=dict)

    def price(
        self, line: InvoiceLine, at: datetime, quantity: int, exact: int
    ) -> tuple[int | None, int]:
        """Picounits per unit, None where tiers leave no single price, and for the quantity. `exact`
        picounits were charged.
        """
        own = self.book.by_id.get(line.price_version)
        if own is None:
            return None, exact
        component = Component(line.component)
        listed = None if own.tenant_id == "" else self._in_force(line, at, own.currency)
        if listed is None:
            listed = own
        unit = _unit(listed, component)
        if unit is not None:
            return unit, unit * quantity
        if listed.rates.get(component) == own.rates.get(component):
            return None, _undiscounted(exact, own.discount_ppm)
        rate = listed.rates.get(component)
        return None, rate.total(quantity) if rate else 0

    def _in_force(self, line: InvoiceLine, at: datetime, currency: str) -> PriceVersion | None:
        key = (line.model, line.adapter, at, currency)
        if key not in self._listed:
            try:
                self._listed[key] = self.book.pin(
                    "", line.model, line.adapter or None, at, currency
                )
            except NotFound:
                self._listed[key] = None
        return self._listed[key]


def _unit(version: PriceVersion, component: Component) -> int | None:
    """Picounits per unit before any discount; None if it depends on other usage."""
    rate = version.rates.get(component)
    if rate is None:
        return 0
    return rate.tiers[0].unit if rate.is_linear else None


def _undiscounted(exact: int, discount_ppm: int) -> int:
    """What was charged before the discount, to half a picounit."""
    kept = PPM - discount_ppm
    return (exact * PPM * 2 + kept) // (2 * kept) if kept else exact
