"""Exact money. Amounts are integers of picounits (10^-12 of the currency's major unit), never floats.

A price with up to six decimals per million tokens is a whole number of picounits per token, so a
charge is a product of integers and needs no rounding. `round_to_minor` rounds to the minor unit, half
away from zero, once per invoice line, and also returns the remainder.
"""

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

PICO = 10**12  # units in one major unit (1 USD)
MINOR_DIGITS = {"USD": 2, "EUR": 2, "GBP": 2, "CHF": 2, "CAD": 2, "AUD": 2, "JPY": 0, "KRW": 0}


class CurrencyMismatch(ValueError):
    """Two amounts in different currencies were added or compared."""


def minor_digits(currency: str) -> int:
    if currency not in MINOR_DIGITS:
        raise ValueError(f"unknown currency {currency!r}; known: {', '.join(sorted(MINOR_DIGITS))}")
    return MINOR_DIGITS[currency]


@dataclass(frozen=True, slots=True, order=False)
class Money:
    units: int  # picounits
    currency: str = "USD"

    def __post_init__(self) -> None:
        if type(self.units) is not int:
            raise TypeError(f"money is an int of picounits, not {type(self.units).__name__}")
        minor_digits(self.currency)

    def __add__(self, other: "Money") -> "Money":
        return Money(self.units + self._same(other).units, self.currency)

    def __sub__(self, other: "Money") -> "Money":
        return Money(self.units - self._same(other).units, self.currency)

    def __neg__(self) -> "Money":
        return Money(-self.units, self.currency)

    def __mul__(self, count: int) -> "Money":
        if type(count) is not int:
            raise TypeError(f"money can be multiplied by an int only, not {type(count).__name__}")
        return Money(self.units * count, self.currency)

    def __lt__(self, other: "Money") -> bool:
        return self.units < self._same(other).units

    def __le__(self, other: "Money") -> bool:
        return self.units <= self._same(other).units

    def _same(self, other: "Money") -> "Money":
        if other.currency != self.currency:
            raise CurrencyMismatch(f"cannot combine {self.currency} and {other.currency}")
        return other

    def __str__(self) -> str:
        return f"{decimal_of(self.units)} {self.currency}"


def units_of(amount: str | int | Decimal) -> int:
    """Picounits of an amount in major units. TypeError for a float, ValueError past 12 decimals."""
    if isinstance(amount, float):
        raise TypeError("money is never a float; write the amount as a string")
    try:
        exact = Decimal(amount)
    except InvalidOperation:
        raise ValueError(f"not an amount of money: {amount!r}") from None
    if not exact.is_finite():
        raise ValueError(f"not an amount of money: {amount!r}")
    scaled = exact.scaleb(12)
    if scaled != scaled.to_integral_value():
        raise ValueError(f"{amount} has more than 12 decimals")
    return int(scaled)


def decimal_of(units: int) -> str:
    """Picounits as a decimal string of major units, without exponent or trailing zeros."""
    sign = "-" if units < 0 else ""
    whole, fraction = divmod(abs(units), PICO)
    digits = f"{fraction:012d}".rstrip("0")
    return f"{sign}{whole}.{digits}" if digits else f"{sign}{whole}"


def round_to_minor(units: int, currency: str) -> tuple[int, int]:
    """(minor units, remainder in picounits), which add up to `units`. Half rounds away from zero."""
    minor = 10 ** (12 - minor_digits(currency))
    rounded = round_half_away(units, minor)
    return rounded, units - rounded * minor


def round_half_away(part: int, whole: int) -> int:
    """The quotient to the nearest integer; half rounds away from zero. `whole` is positive."""
    rounded = (2 * abs(part) + whole) // (2 * whole)
    return rounded if part >= 0 else -rounded


def units_of_minor(minor: int, currency: str) -> int:
    return minor * int(10 ** (12 - minor_digits(currency)))


def format_minor(minor: int, currency: str) -> str:
    """`1234` USD -> `12.34`, for display and exports only."""
    digits = minor_digits(currency)
    if digits == 0:
        return str(minor)
    sign = "-" if minor < 0 else ""
    whole, cents = divmod(abs(minor), int(10**digits))
    return f"{sign}{whole}.{cents:0{digits}d}"


def split(units: int, weights: list[int]) -> list[int]:
    """Split an amount by integer weights; the largest remainders get the last units."""
    total = sum(weights)
    if total <= 0 or any(weight < 0 for weight in weights):
        raise ValueError(f"weights must be non-negative and not all zero: {weights}")
    shares = [units * weight // total for weight in weights]
    left = units - sum(shares)
    order = sorted(range(len(weights)), key=lambda i: (-(units * weights[i] % total), i))
    for index in order[:left]:
        shares[index] += 1
    return shares
