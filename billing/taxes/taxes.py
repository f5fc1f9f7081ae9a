"""The tax port: the taxes on what one invoice supplies, each at the time of its supply.

`RateTable` applies rates of our own tables; a tax service such as Stripe Tax answers over the network,
so `tax_quotes` asks it outside the transaction.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from billing.accounts.tax_ids import EU, country_of, eu_country

_PPM = 1_000_000


class Treatment(StrEnum):
    STANDARD = "standard"
    EXEMPT = "exempt"
    REVERSE_CHARGE = "reverse_charge"


@dataclass(frozen=True, slots=True)
class Supply:
    """What was supplied at a moment: the net in minor units, negative where it is taken back."""

    at: datetime
    net_minor: int


@dataclass(frozen=True, slots=True)
class Certificate:
    """An exemption in a region ("" is everywhere), from `valid_from` until before `valid_to`."""

    number: str
    region: str
    valid_from: datetime
    valid_to: datetime | None

    def covers(self, region: str, at: datetime) -> bool:
        here = self.region in ("", region, country_of(region))
        return here and self.valid_from <= at and (self.valid_to is None or at < self.valid_to)


@dataclass(frozen=True, slots=True)
class Buyer:
    region: str  # "DE", "US-NY"; "" is unknown, and no tax is due
    postal_code: str = ""
    tax_id: str = ""
    exempt: bool = False  # everywhere and always
    certificates: tuple[Certificate, ...] = ()


@dataclass(frozen=True, slots=True)
class TaxRequest:
    currency: str
    seller_region: str
    buyer: Buyer
    supplies: tuple[Supply, ...]

    def treatment(self, at: datetime) -> tuple[Treatment, str]:
        """How a supply at this moment is treated, and the number that proves it.

        Reverse charge: the buyer is a business in another EU country, shown by its VAT id (article
        196 of directive 2006/112/EC).
        """
        buyer = self.buyer
        if buyer.exempt:
            return Treatment.EXEMPT, ""
        for certificate in buyer.certificates:
            if certificate.covers(buyer.region, at):
                return Treatment.EXEMPT, certificate.number
        seller, country = country_of(self.seller_region), country_of(buyer.region)
        abroad = seller in EU and country in EU and seller != country
        if abroad and eu_country(buyer.tax_id) == country:
            return Treatment.REVERSE_CHARGE, buyer.tax_id
        return Treatment.STANDARD, ""


@dataclass(frozen=True, slots=True)
class Tax:
    """One tax of an invoice. `proof` is the certificate or tax id behind a zero."""

    name: str
    rate_ppm: int
    taxable_minor: int
    amount_minor: int
    treatment: Treatment = Treatment.STANDARD
    proof: str = ""

    @property
    def description(self) -> str:
        """As the invoice prints it."""
        if self.treatment is Treatment.REVERSE_CHARGE:
            return f"{self.name}: reverse charge, the recipient owes the tax; tax id {self.proof}"
        if self.treatment is Treatment.EXEMPT:
            return f"{self.name}: exempt" + (f", certificate {self.proof}" if self.proof else "")
        return self.name


class TaxService(Protocol):
    """`tests/contracts/test_taxes.py` states what every service does."""

    def taxes(self, request: TaxRequest) -> list[Tax]:
        """The taxes by name, rate and treatment. A supply with a negative net returns its tax.
        Empty where no tax is known."""
        ...


def share(minor: int, rate_ppm: int) -> int:
    """A share of an amount in minor units, rounded half away from zero."""
    part = (abs(minor) * rate_ppm + _PPM // 2) // _PPM
    return part if minor >= 0 else -part


def merged(taxes: Iterable[Tax]) -> list[Tax]:
    """Taxes with the same name, rate and treatment as one, in the order in which they came."""
    found: dict[tuple[str, int, Treatment, str], Tax] = {}
    for each in taxes:
        key = (each.name, each.rate_ppm, each.treatment, each.proof)
        before = found.get(key)
        taxable = each.taxable_minor + (before.taxable_minor if before else 0)
        amount = each.amount_minor + (before.amount_minor if before else 0)
        found[key] = Tax(each.name, each.rate_ppm, taxable, amount, each.treatment, each.proof)
    return list(found.values())
