"""Amounts of money as they are given to a command."""

from core.errors import BadRequest
from core.money import round_to_minor, units_of


def minor_of(amount: str, currency: str) -> int:
    """Minor units of a decimal `--amount`; BadRequest if it is none, or not a whole number of them."""
    try:
        minor, left = round_to_minor(units_of(amount), currency)
    except ValueError as error:
        raise BadRequest(f"--amount: {error}.") from None
    if left:
        raise BadRequest(f"--amount: {amount} {currency} is no whole amount of minor units.")
    return minor
