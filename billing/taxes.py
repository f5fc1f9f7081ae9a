"""Taxes by configured rates and exemptions, behind a port for external tax services."""

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.models import BillingAccount, TaxRate
from core.errors import BadRequest

_PPM = 1_000_000


@dataclass(frozen=True, slots=True)
class Tax:
    name: str
    rate_ppm: int
    amount_minor: int


class TaxService(Protocol):
    def taxes(
        self, session: Session, account: BillingAccount, taxable_minor: int, at: datetime
    ) -> list[Tax]:
        """The taxes on a net amount in minor units at a moment; none for an exempt account."""
        ...


class ConfiguredTaxes:
    """Applies the rates in force in the account's region; each tax is rounded once. Reads the rates
    once, so use one instance per transaction.
    """

    def __init__(self) -> None:
        self._rates: dict[str, list[TaxRate]] | None = None

    def taxes(
        self, session: Session, account: BillingAccount, taxable_minor: int, at: datetime
    ) -> list[Tax]:
        if account.tax_exempt or not account.tax_region or taxable_minor <= 0:
            return []
        if self._rates is None:
            self._rates = defaultdict(list)
            for rate in session.scalars(select(TaxRate).order_by(TaxRate.name, TaxRate.id)):
                self._rates[rate.region].append(rate)
        return [
            Tax(rate.name, rate.rate_ppm, share(taxable_minor, rate.rate_ppm))
            for rate in self._rates.get(account.tax_region, ())
            if rate.effective_from <= at and (rate.effective_to is None or rate.effective_to > at)
        ]


def share(minor: int, rate_ppm: int) -> int:
    """A share of an amount in minor units, rounded half away from zero."""
    part = (abs(minor) * rate_ppm + _PPM // 2) // _PPM
    return part if minor >= 0 else -part


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
