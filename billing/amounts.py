"""Amounts as JSON: exact units and minor units with their currency."""

from typing import Any

from core.money import decimal_of, format_minor, units_of_minor


def money(units: int, currency: str) -> dict[str, Any]:
    """An exact amount: a decimal of major units, and whole picounits."""
    return {"amount": decimal_of(units), "units": str(units), "currency": currency}


def minor(amount: int, currency: str) -> dict[str, Any]:
    """A rounded amount: the fields of `money`, plus minor units and a formatted text."""
    exact = money(units_of_minor(amount, currency), currency)
    return {"minor": amount, "text": format_minor(amount, currency), **exact}
