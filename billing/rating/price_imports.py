"""Saving the prices of a list: each difference from the price in force begins a new version.

All of a list is saved or none of it, and what has no difference is left alone, so that a second import
changes nothing. Versions are never edited.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from fractions import Fraction
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.pricing import price_lists, price_terms, prices
from billing.pricing.price_lists import Listed
from billing.pricing.pricing import ANY, Component, PriceVersion, in_force
from billing.pricing.tables import PriceVersionRow
from billing.rating import price_changes
from core.clock import Clock
from core.errors import BadRequest, TollhouseError
from core.money import decimal_of

_PPM_UNITS = 10**8  # picounits of a percent for each millionth


@dataclass(frozen=True, slots=True)
class Terms:
    """How a list becomes prices: the mark-up where a row has none, and from when they hold."""

    mark_up: Fraction
    start: datetime
    note: str
    actor: str


@dataclass(frozen=True, slots=True)
class Change:
    """Written rates of a model before and after; `before` is None for a model without a price."""

    model: str
    currency: str
    before: dict[str, Any] | None
    after: dict[str, Any]
    left_out: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return self.before != self.after

    def components(self) -> list[tuple[str, Any, Any]]:
        """Name, before and after of the rates that differ; None where there is none."""
        known = self.before or {}
        names = [each.value for each in Component if each.value in {*known, *self.after}]
        rows = ((name, known.get(name), self.after.get(name)) for name in names)
        return [(name, before, after) for name, before, after in rows if before != after]


def compare(session: Session, listed: Iterable[Listed], terms: Terms) -> list[Change]:
    """What an import would change, by model. BadRequest names the model whose price is refused."""
    return [_change(session, each, terms)[0] for each in listed]


def save(session: Session, clock: Clock, listed: Iterable[Listed], terms: Terms) -> list[Change]:
    """As `compare`, and saves what differs."""
    found = []
    for each in listed:
        change, draft = _change(session, each, terms)
        found.append(change)
        if change.differs:
            gone = {component.value: None for component in Component}
            whole = replace(draft, written=gone | change.after)
            try:
                price_changes.save(session, clock, whole)
            except TollhouseError as error:
                raise _of_model(each, error) from None
    return found


def described(changes: Iterable[Change]) -> dict[str, Any]:
    """The rates that differ, and by model the fields of the list without a matching component."""
    given = list(changes)
    rows = [
        {
            "model": each.model,
            "component": component,
            "before": _written(before),
            "after": _written(after),
            "currency": each.currency,
        }
        for each in given
        for component, before, after in each.components()
    ]
    left_out = {each.model: list(each.left_out) for each in given if each.left_out}
    return {"changes": rows, "left_out": left_out}


def _written(rate: Any) -> str | None:
    return None if rate is None else str(rate)


def _change(session: Session, listed: Listed, terms: Terms) -> tuple[Change, prices.PriceDraft]:
    before = _in_force(session, listed, terms.start)
    draft = prices.PriceDraft(
        listed.model,
        price_lists.marked_up(listed, terms.mark_up),
        terms.start,
        currency=listed.currency,
        discount_percent=decimal_of(before.discount_ppm * _PPM_UNITS) if before else "0",
        note=terms.note,
        created_by=terms.actor,
    )
    try:
        after = price_terms.written(prices.validate(draft).rates)
    except TollhouseError as error:
        raise _of_model(listed, error) from None
    known = price_terms.written(before.rates) if before is not None else None
    return Change(listed.model, listed.currency, known, after, listed.left_out), draft


def _of_model(listed: Listed, error: TollhouseError) -> BadRequest:
    return BadRequest(
        f"{listed.model}: {error.message}", next_step=error.next_step, param=error.param
    )


def _in_force(session: Session, listed: Listed, at: datetime) -> PriceVersion | None:
    row = PriceVersionRow
    rows = session.scalars(
        select(row).where(
            row.model == listed.model,
            row.tenant_id == "",
            row.adapter == ANY,
            row.currency == listed.currency,
        )
    )
    there = [each for each in rows if in_force(each.effective_from, each.effective_to, at)]
    return prices.version_of(there[0]) if there else None
