"""The price that a served model has before the operator sets one."""

from collections.abc import Iterable, Sequence

from sqlalchemy.orm import Session

from billing.pricing.prices import ensure_default_prices, ensure_price
from core.clock import Clock
from gateway.catalog.upstreams import Upstream


def ensure_model_prices(
    session: Session, clock: Clock, upstreams: Sequence[Upstream], own: str, names: Iterable[str]
) -> None:
    """The price of a model's upstream entry, else the default price. `own` is the name of the entries
    that name no model."""
    for name in names:
        entry = next(
            (each for each in upstreams if each.price and (each.model or own) == name), None
        )
        if entry is not None:
            ensure_price(session, clock, name, entry.price, "of the upstream's entry")
        else:
            ensure_default_prices(session, clock, name)
