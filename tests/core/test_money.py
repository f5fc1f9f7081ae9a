"""Money is exact: no float gets in, one rounding rule, and what rounding leaves is never lost."""

from decimal import ROUND_HALF_UP, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.money import (
    PICO,
    CurrencyMismatch,
    Money,
    decimal_of,
    format_minor,
    round_to_minor,
    split,
    units_of,
    units_of_minor,
)

amounts = st.integers(-(10**24), 10**24)


@given(amounts, st.sampled_from(["USD", "JPY"]))
def test_rounding_conserves_and_goes_half_away_from_zero(units: int, currency: str) -> None:
    minor, left = round_to_minor(units, currency)
    assert units_of_minor(minor, currency) + left == units
    digits = 2 if currency == "USD" else 0
    exact = (Decimal(units) / PICO).scaleb(digits)
    assert minor == int(exact.to_integral_value(rounding=ROUND_HALF_UP))


@given(amounts)
def test_a_decimal_comes_back_as_it_went(units: int) -> None:
    assert units_of(decimal_of(units)) == units


@given(st.integers(0, 10**18), st.lists(st.integers(0, 50), min_size=1).filter(any))
def test_a_split_loses_nothing(units: int, weights: list[int]) -> None:
    shares = split(units, weights)
    assert sum(shares) == units
    assert all(share >= 0 for share in shares)


@pytest.mark.parametrize("wrong", [0.1, 1.0, float("nan")])
def test_a_float_is_refused(wrong: float) -> None:
    with pytest.raises(TypeError):
        units_of(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Money(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["", "ten", "NaN", "Infinity", "0.0000000000001"])
def test_what_is_no_amount_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"amount|decimals"):
        units_of(wrong)


def test_currencies_do_not_mix() -> None:
    with pytest.raises(CurrencyMismatch):
        Money(1, "USD") + Money(1, "EUR")
    with pytest.raises(ValueError, match="unknown currency"):
        Money(1, "ZZZ")


def test_minor_units_read_as_people_write_them() -> None:
    assert format_minor(1234, "USD") == "12.34"
    assert format_minor(-5, "USD") == "-0.05"
    assert format_minor(1234, "JPY") == "1234"
