"""Invoice totals in minor units from exact lines. Pure functions; each line is rounded once.

The rounding difference between the amount due and the exact amount in the ledger is posted to the
rounding account, so that both agree exactly.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from billing.invoicing.invoice_lines import Line
from billing.invoicing.promoted_fees import of_line, of_lines
from billing.taxes.taxes import Supply, Tax
from core.money import round_half_away, round_to_minor, units_of_minor

ROUNDING = "rounding"  # a kind of line
_LAST_MOMENT = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Net:
    """Totals before tax."""

    exact: int
    promo: (
        int  # picounits of promotional credit used, less what returned of fees of earlier invoices
    )
    currency: str
    subtotal_minor: int
    promo_minor: int
    prepaid: int = 0  # picounits of prepaid credit used for it

    @property
    def taxable_minor(self) -> int:
        return self.subtotal_minor - self.promo_minor

    @property
    def prepaid_minor(self) -> int:
        return round_to_minor(self.prepaid, self.currency)[0]

    @property
    def left_minor(self) -> int:
        """What the credit leaves, before tax."""
        return self.taxable_minor - self.prepaid_minor


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


def net_of(lines: Sequence[Line], promo: int, prepaid: int, currency: str) -> Net:
    exact = sum(line.exact for line in lines)
    subtotal = sum(line.minor for line in lines)
    return Net(exact, promo, currency, subtotal, round_to_minor(promo, currency)[0], prepaid)


def drift_lines(net: Net, bounds: tuple[datetime, datetime]) -> list[Line]:
    """Where credit pays: what separates the sum of the rounded lines from the credit and the rest, each
    rounded once. With it the credit shown is what left the wallet, and the amount due is neither below
    zero nor above the total."""
    if not (net.promo or net.prepaid):
        return []
    left = round_to_minor(net.exact - net.promo - net.prepaid, net.currency)[0]
    drift = left - net.left_minor
    return [Line(ROUNDING, "Rounding of the lines", 0, drift, *bounds)] if drift else []


def owed_of(lines: Sequence[Line]) -> int:
    """Picounits before credit; what returns as promotional credit lowers nothing."""
    return sum(line.exact for line in lines) + sum(of_lines(lines).values())


def over_drawn(lines: Sequence[Line], promo: int, prepaid: int) -> tuple[int, int]:
    """Picounits of promotional and of prepaid credit that the lines, lowered since, do not need."""
    most = max(0, promo + prepaid - max(0, owed_of(lines)))
    gift = min(most, promo)
    return gift, most - gift


def supplies_of(lines: list[Line], promo_minor: int, now: datetime) -> tuple[Supply, ...]:
    """The net of the lines by time of supply: the last moment of a line's period, or now if it has not
    ended; of a fee that returns, when it was billed. Promotional credit lowers what is positive, in
    proportion, and what returns of it the tax that returns.
    """
    nets: dict[datetime, int] = defaultdict(int)
    for line in lines:
        returned = line.details.get("taxed_at")  # a fee that was billed ahead
        supplied = datetime.fromisoformat(returned) if returned else line.ends_at - _LAST_MOMENT
        gift = sum(of_line(line).values())
        gift_minor = round_half_away(line.minor * gift, line.exact) if gift else 0  # below zero
        promo_minor -= gift_minor
        nets[min(now, supplied)] += line.minor - gift_minor
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


def totals_of(net: Net, taxes: list[Tax], prepaid_tax_minor: int = 0) -> Totals:
    """`prepaid_tax_minor` is what prepaid credit paid for the tax."""
    tax_minor = sum(tax.amount_minor for tax in taxes)
    prepaid_minor = net.prepaid_minor + prepaid_tax_minor
    due = net.taxable_minor + tax_minor - prepaid_minor
    exact_due = net.exact - net.promo - net.prepaid
    exact_due += units_of_minor(tax_minor - prepaid_tax_minor, net.currency)
    return Totals(net, tax_minor, prepaid_minor, units_of_minor(due, net.currency) - exact_due)
