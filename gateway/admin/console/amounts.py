"""Parses amounts of money in command-line options."""

from core.errors import BadRequest
from core.money import units_of


def units_of_amount(amount: str) -> int:
    """Picounits of a decimal `--amount` in major units."""
    try:
        return units_of(amount)
    except ValueError as error:
        raise BadRequest(f"--amount: {error}.") from None
