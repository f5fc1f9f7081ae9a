"""Prices of a configuration: a difference begins a new version; versions are never edited."""

from collections.abc import Sequence
from dataclasses import replace

from billing.pricing import price_terms, prices
from billing.pricing.pricing import Component
from billing.rating import price_changes
from core.errors import BadRequest, TollhouseError
from gateway.admin.configuration import document, state
from gateway.admin.configuration.changes import ACTOR, Change, Work, each_once
from gateway.edge.decoding import parse_datetime


def apply(work: Work, tenant_id: str, place: str, wanted: Sequence[document.Price]) -> None:
    """`tenant_id` empty: list prices."""
    for price in each_once(wanted, place, _name):
        try:
            _apply(work, tenant_id, f"{place} {_name(price)}", price)
        except TollhouseError as error:
            message = f"{place} {_name(price)}: {error.message}"
            raise BadRequest(message, next_step=error.next_step, param=error.param) from None


def _name(price: document.Price) -> str:
    adapter = "" if price.adapter == "*" else f":{price.adapter}"
    start = f" from {price.start}" if price.start else ""
    return f"{price.model}{adapter} in {price.currency}{start}"


def _apply(work: Work, tenant_id: str, place: str, wanted: document.Price) -> None:
    now = work.clock.now()
    start = parse_datetime(wanted.start, "from") if wanted.start else None
    draft = prices.PriceDraft(
        wanted.model,
        {name: rate for name, rate in wanted.rates.items() if rate is not None},
        start or now,
        tenant_id=tenant_id,
        adapter=wanted.adapter,
        currency=wanted.currency,
        discount_percent=wanted.discount_percent,
        note=wanted.note,
        created_by=ACTOR,
    )
    version = prices.validate(draft)
    after = price_terms.written(version.rates)
    for row in work.session.scalars(state.price_rows(draft)):
        ended = row.effective_to is not None and row.effective_to <= now
        begins_then = row.effective_from == start if start else row.effective_from <= now
        if ended or not begins_then:
            continue
        have = prices.version_of(row)
        if (have.rates, have.discount_ppm) == (version.rates, version.discount_ppm):
            return
        before = price_terms.written(have.rates)
        if start is not None:
            raise BadRequest(
                f"a version begins then at {before}, and prices are never edited.",
                next_step="Give a later `from`, or leave it out to begin a version now.",
            )
        work.changes.append(Change(place, before, after))
        break
    else:
        work.changes.append(Change(place, None, after))
    # The file has all rates, so none is kept of the version before.
    gone = {each.value: None for each in Component}
    price_changes.save(work.session, work.clock, replace(draft, written=gone | draft.written))
