"""The columns of daily sums that are billed, by component."""

from collections.abc import Mapping, Sequence

from billing.pricing.component_columns import amount_of, count_of
from billing.pricing.pricing import PARTS, PRICED_AS, Component, Rate, priced_as
from billing.usage.tables import DailyUsage

KEY = (
    DailyUsage.project_id,
    DailyUsage.model,
    DailyUsage.adapter,
    DailyUsage.kind,
    DailyUsage.price_version,
    DailyUsage.usage_period_id,
)
SUMS = tuple((each, count_of(each, DailyUsage), amount_of(each, DailyUsage)) for each in Component)
_PLACE = {component: 2 * index for index, component in enumerate(Component)}
_DIVIDED = tuple(_PLACE[part] for part in PRICED_AS)


def is_divided(sums: Sequence[int]) -> bool:
    """Whether these quantities and picounits, as in SUMS, have parts that another rate may price."""
    return any(sums[place] for place in _DIVIDED)


def priced_sums(sums: Sequence[int], rates: Mapping[Component, Rate]) -> tuple[int, ...]:
    """Quantities and picounits as in SUMS, with each quantity at the component whose rate prices it."""
    found = [*sums]
    for part in PARTS:
        priced = priced_as(rates, part)
        if priced is not part:
            found[_PLACE[priced]] += sums[_PLACE[part]]
            found[_PLACE[part]] -= sums[_PLACE[part]]
    return tuple(found)
