"""Parses amounts of money in command-line options."""

from core.errors import BadRequest
from core.money import round_to_minor, units_of


def minor_of(amount: str, currency: str) -> int:
    """Minor units of a decimal `--amount`. Raises BadRequest if it is not a whole number of them."""
    try:
        minor, left = round_to_minor(units_of(amount), currency)
    except ValueError as error:
        raise BadRequest(f"--amount: {error}.") from None
    if left:
        raise BadRequest(
            f"--amount: {amount} {currency} has more decimals than the currency.",
            next_step="Round it.",
        )
    return minor
