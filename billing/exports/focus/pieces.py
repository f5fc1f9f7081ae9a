"""The pieces that a line consists of: a day, a key and a unit price."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from billing.exports.focus import skus
from billing.exports.focus.list_prices import ListPrices
from billing.exports.focus.skus import Sku, UnitPrices
from billing.exports.focus.tier_parts import STANDARD, Part, Point, parts_of, points_of
from billing.pricing.pricing import Component, PriceVersion
from core.money import PICO

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Quantities are in 10^-12, `exact` in picounits; without a SKU there are no unit prices."""

    starts_at: datetime
    ends_at: datetime
    key_id: str | None
    sku: Sku | None = None
    version: str = ""  # of the price
    consumed: int | None = None
    quantity: int | None = None
    prices: UnitPrices | None = None
    exact: int = 0
    labels: str = ""  # in their canonical form

    @property
    def weight(self) -> int:
        """For the split of what rounding leaves, where no amount gives a proportion."""
        return max(0, self.consumed or 0)


What = tuple[str, str, Component]  # model, adapter and component


class OnePrice:
    """Pieces of usage whose price does not depend on other usage: what they share is made once."""

    def __init__(self, listed: ListPrices, what: What, version: PriceVersion) -> None:
        self._listed, self._what, self._version = listed, what, version
        self._point = points_of(version.rates.get(what[2]))[0]
        self._sku = skus.of_usage(*what, version, self._point)
        self._prices: dict[int, UnitPrices] = {}  # by list price

    def piece(self, day: datetime, key_id: str, used: tuple[int, int], labels: str) -> Piece:
        """`used`: quantity and picounits."""
        quantity, amount = used
        unit = self._listed.unit(self._what, self._version, self._point, day)
        prices = self._prices.get(unit)
        if prices is None:
            prices = skus.unit_prices(self._what[2], self._version, self._point, unit)
            self._prices[unit] = prices
        units = quantity * PICO
        return Piece(
            day,
            day + _DAY,
            key_id,
            self._sku,
            self._version.id,
            units,
            units // self._sku.block,
            prices,
            amount,
            labels,
        )


def pieces_of(
    listed: ListPrices,
    what: What,
    version: PriceVersion | None,
    plain: Piece,
    used: tuple[int, int],
) -> list[Piece]:
    """One piece for each unit price of what was used for `plain.exact` picounits; `used` is the units
    before, and the units. Their exact amounts sum to that of `plain`."""
    if version is None:
        return [_averaged(what, plain, used[1])]
    component = what[2]
    rate = version.rates.get(component)
    parts = parts_of(rate, version.discount_ppm, *used, plain.exact)
    found = of_parts(listed, what, version, plain, parts)
    rest = plain.exact - sum(each.exact for each in found)
    if rest:
        found[-1] = replace(found[-1], exact=found[-1].exact + rest)
    return found


def of_parts(
    listed: ListPrices, what: What, version: PriceVersion, plain: Piece, parts: Sequence[Part]
) -> list[Piece]:
    """Pieces that cost what their prices say."""
    model, adapter, component = what
    found = []
    for part in parts or [Part(Point(STANDARD, 0, 0), 0, 0)]:
        sku = skus.of_usage(model, adapter, component, version, part.point)
        unit = listed.unit(what, version, part.point, plain.starts_at)
        prices = skus.unit_prices(component, version, part.point, unit)
        block = 1 if part.point.package > 1 or not part.point.counted else sku.block
        quantity = part.priced * PICO // block
        consumed, exact = part.quantity * PICO, prices.cost(quantity)
        found.append(
            replace(
                plain, sku=sku, prices=prices, consumed=consumed, quantity=quantity, exact=exact
            )
        )
    return found


def _averaged(what: What, plain: Piece, quantity: int) -> Piece:
    """Usage whose price version is not known: the price is what it cost on average."""
    model, adapter, component = what
    sku = skus.of_usage(model, adapter, component, None, Point(STANDARD, 0, 0))
    unit = plain.exact * sku.block // quantity if quantity > 0 else 0
    return replace(
        plain,
        sku=sku,
        prices=UnitPrices(max(0, unit), max(0, unit)),
        consumed=quantity * PICO,
        quantity=quantity * PICO // sku.block,
    )
