"""The tax service of our own table of rates by region."""

from collections import defaultdict
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.taxes.tables import TaxRate
from billing.taxes.taxes import Tax, TaxRequest, Treatment, share
from core.errors import BadRequest

_PPM = 1_000_000
_Key = tuple[str, int, Treatment, str]  # name, rate, treatment, proof


class RateTable:
    """Applies the rates of the buyer's region, each tax rounded once. Reads the rates once, so use
    one instance per transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rates: dict[str, list[TaxRate]] | None = None

    def taxes(self, request: TaxRequest) -> list[Tax]:
        bases: dict[_Key, int] = defaultdict(int)
        for supply in request.supplies:
            treatment, proof = request.treatment(supply.at)
            for rate in self._in_force(request.buyer.region, supply.at):
                ppm = rate.rate_ppm if treatment is Treatment.STANDARD else 0
                bases[rate.name, ppm, treatment, proof] += supply.net_minor
        return [
            Tax(name, ppm, base, share(base, ppm), treatment, proof)
            for (name, ppm, treatment, proof), base in bases.items()
            if base
        ]

    def _in_force(self, region: str, at: datetime) -> list[TaxRate]:
        if self._rates is None:
            self._rates = defaultdict(list)
            for rate in self._session.scalars(select(TaxRate).order_by(TaxRate.name, TaxRate.id)):
                self._rates[rate.region].append(rate)
        return [
            rate
            for rate in self._rates.get(region, ())
            if rate.effective_from <= at and (rate.effective_to is None or rate.effective_to > at)
        ]


def add_rate(
    session: Session, region: str, name: str, rate_ppm: int, effective_from: datetime
) -> TaxRate:
    """Add a rate from this moment on; the previous rate of the same name ends."""
    if not 0 <= rate_ppm <= _PPM:
        raise BadRequest(
            f"rate is {rate_ppm / 10_000:g} percent; it must be 0 to 100 percent.", param="rate"
        )
    before = session.scalar(
        select(TaxRate).where(
            TaxRate.region == region, TaxRate.name == name, TaxRate.effective_to.is_(None)
        )
    )
    if before is not None:
        if before.effective_from >= effective_from:
            raise BadRequest(
                f"{name} in {region} has a rate from {before.effective_from:%Y-%m-%d} on.",
                next_step="Choose a later effective_from.",
                param="effective_from",
            )
        before.effective_to = effective_from
    created = TaxRate(region=region, name=name, rate_ppm=rate_ppm, effective_from=effective_from)
    session.add(created)
    session.flush()
    return created
