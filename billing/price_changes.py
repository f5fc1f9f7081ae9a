"""Saving of a price by an operator: usage that waited for it is released with it."""

from sqlalchemy.orm import Session

from billing import prices, usage
from billing.pricing import PriceVersion
from core.clock import Clock


def save(session: Session, clock: Clock, draft: prices.PriceDraft) -> PriceVersion:
    """As `prices.save`; then retries the parked events, which lacked a price in this currency."""
    version = prices.save(session, clock, draft)
    usage.release(session, clock)
    return version
