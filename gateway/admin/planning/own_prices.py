"""What the deployment itself takes for the tokens of a plan."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from billing.pricing.prices import load_price_book
from billing.pricing.pricing import Component, PriceVersion
from core.errors import TollhouseError
from core.money import PICO
from engine.planning.workload import Workload

_HOUR = 3600


@dataclass(frozen=True, slots=True)
class SoldAt:
    """The price version that a request of this model would have now."""

    model: str
    version: PriceVersion

    def margin(self, work: Workload, rate: float, cost: float | None) -> dict[str, Any]:
        """Of an hour: revenue by the version's own tiers, less the devices' cost in dollars."""
        requests = rate * _HOUR
        quantities = {
            Component.INPUT: work.computed,
            Component.CACHED_INPUT: work.shared,
            Component.OUTPUT: work.output,
            Component.REQUEST: 1.0,
        }
        units = sum(
            self.version.total(component, round(requests * each))
            for component, each in quantities.items()
        )
        revenue = units / PICO
        same = self.version.currency == "USD" and cost is not None
        return {
            "model": self.model,
            "price": self.version.id,
            "currency": self.version.currency,
            "revenue_per_hour": round(revenue, 4),
            "per_hour": round(revenue - cost, 4) if same and cost is not None else None,
            "share": round(1 - cost / revenue, 4)
            if same and cost is not None and revenue
            else None,
        }


def sold_at(session: Session, model: str, now: datetime, currency: str = "USD") -> SoldAt | None:
    """None where the deployment has no price for the model in that currency."""
    try:
        return SoldAt(model, load_price_book(session).pin("", model, None, now, currency))
    except TollhouseError:
        return None
