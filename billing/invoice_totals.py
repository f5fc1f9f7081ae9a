"""Invoice totals in minor units from exact lines. Pure functions; each line is rounded once.

The rounding difference between the amount due and the exact amount in the ledger is posted to the
rounding account, so that both agree exactly.
"""

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta

from billing.invoice_lines import Line
from billing.taxes import Supply, Tax
from core.money import round_to_minor, units_of_minor

_LAST_MOMENT = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Net:
    """Totals before tax."""

    exact: int
    promo: int  # picounits of promotional credit used
    currency: str
    subtotal_minor: int
    promo_minor: int

    @property
    def taxable_minor(self) -> int:
        return self.subtotal_minor - self.promo_minor


@dataclass(frozen=True, slots=True)
class Totals:
    net: Net
    tax_minor: int
    prepaid_minor: int
    rounding: int  # picounits: amount due minus exact amount

    @property
    def total_minor(self) -> int:
        return self.net.taxable_minor + self.tax_minor

    @property
    def due_minor(self) -> int:
        return self.total_minor - self.prepaid_minor


def net_of(lines: list[Line], promo: int, currency: str) -> Net:
    """The credit in minor units is the subtotal minus the rounded exact remainder, so that credit
    that covers the exact sum leaves zero.
    """
    exact = sum(line.exact for line in lines)
    subtotal = sum(line.minor for line in lines)
    promo_minor = subtotal - round_to_minor(exact - promo, currency)[0] if promo else 0
    return Net(exact, promo, currency, subtotal, promo_minor)


def supplies_of(lines: list[Line], promo_minor: int, now: datetime) -> tuple[Supply, ...]:
    """The net of the lines by time of supply: the last moment of a line's period, or now if it has not
    ended; of a fee that returns, when it was billed. Promotional credit lowers what is positive, in
    proportion.
    """
    nets: dict[datetime, int] = defaultdict(int)
    for line in lines:
        returned = line.details.get("taxed_at")  # a fee that was billed ahead
        supplied = datetime.fromisoformat(returned) if returned else line.ends_at - _LAST_MOMENT
        nets[min(now, supplied)] += line.minor
    whole = sum(max(0, net) for net in nets.values())
    found, before = [], 0
    for at, net in sorted(nets.items()):
        part = max(0, net)
        lowered = (
            promo_minor * (before + part) // whole - promo_minor * before // whole if part else 0
        )
        before += part
        if net != lowered:
            found.append(Supply(at, net - lowered))
    return tuple(found)


def totals_of(net: Net, taxes: list[Tax], prepaid: int, prepaid_tax_minor: int = 0) -> Totals:
    """`prepaid` picounits paid for the net amount, `prepaid_tax_minor` paid for the tax."""
    tax_minor = sum(tax.amount_minor for tax in taxes)
    prepaid_minor = prepaid_tax_minor
    if prepaid:
        left = round_to_minor(net.exact - net.promo - prepaid, net.currency)[0]
        prepaid_minor += net.taxable_minor - left
    due = net.taxable_minor + tax_minor - prepaid_minor
    exact_due = net.exact - net.promo - prepaid
    exact_due += units_of_minor(tax_minor - prepaid_tax_minor, net.currency)
    return Totals(net, tax_minor, prepaid_minor, units_of_minor(due, net.currency) - exact_due)
