"""Saving of a price by an operator: what it does not name stays, and usage that waited is released."""

from collections.abc import Mapping
from dataclasses import replace

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.pricing import prices
from billing.pricing.pricing import ANY, Component, PriceVersion, Rate
from billing.pricing.tables import PriceVersionRow
from billing.usage import usage
from core.clock import Clock


def save(session: Session, clock: Clock, draft: prices.PriceDraft) -> PriceVersion:
    """As `prices.save`, with the rates of the open version before it that the draft does not name; a
    component that is null is removed. Then retries the parked events, which lacked a price in this
    currency."""
    stays = kept(session, draft)
    written = {name: value for name, value in draft.written.items() if value is not None}
    version = prices.save(session, clock, replace(draft, written=written), stays)
    usage.release(session, clock)
    return version


def kept(session: Session, draft: prices.PriceDraft) -> Mapping[Component, Rate]:
    """The rates that stay from the open version that the draft will end."""
    row = session.scalars(
        select(PriceVersionRow)
        .where(
            PriceVersionRow.tenant_id == draft.tenant_id,
            PriceVersionRow.model == draft.model,
            PriceVersionRow.adapter == (draft.adapter or ANY),
            PriceVersionRow.currency == draft.currency,
            PriceVersionRow.effective_to.is_(None),
            PriceVersionRow.effective_from < draft.effective_from,
        )
        .order_by(PriceVersionRow.effective_from.desc())
    ).first()
    before = prices.version_of(row).rates if row is not None else {}
    return {each: rate for each, rate in before.items() if each.value not in draft.written}
