"""The list price of usage that was billed at a tenant's own price."""

from dataclasses import dataclass, field
from datetime import datetime

from billing.exports.focus.tier_parts import Point, entry_of, points_of
from billing.pricing.pricing import Component, PriceBook, PriceVersion, Rate
from core.errors import NotFound


@dataclass(slots=True)
class ListPrices:
    book: PriceBook
    _listed: dict[tuple[str, str, datetime, str], PriceVersion | None] = field(default_factory=dict)

    def unit(
        self, what: tuple[str, str, Component], own: PriceVersion, point: Point, at: datetime
    ) -> int:
        """Picounits, before any discount, for each that `point` of the own version prices; `what` is
        the model, the adapter and the component. Where the list has other tiers than the own price, the
        own price stands for it."""
        model, adapter, component = what
        listed = own if own.tenant_id == "" else self._in_force((model, adapter), at, own.currency)
        if listed is None or listed is own:
            return point.unit
        rate, mine = listed.rates.get(component), own.rates.get(component)
        if rate is None:
            return 0
        if rate.is_linear:
            return rate.tiers[0].unit * point.package if point.counted else 0
        return _of_same_shape(rate, mine, point)

    def _in_force(self, name: tuple[str, str], at: datetime, currency: str) -> PriceVersion | None:
        key = (*name, at, currency)
        if key not in self._listed:
            try:
                self._listed[key] = self.book.pin("", name[0], name[1] or None, at, currency)
            except NotFound:
                self._listed[key] = None
        return self._listed[key]


def _of_same_shape(listed: Rate, own: Rate | None, point: Point) -> int:
    points = points_of(listed)
    if own is None or [each.name for each in points] != [each.name for each in points_of(own)]:
        return point.unit
    same = points[point.index]
    if point.counted:
        return same.unit
    entry = entry_of(listed, same)
    return entry.unit if entry is not None else 0
