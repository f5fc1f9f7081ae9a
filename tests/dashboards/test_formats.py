"""Amounts and times as pages show them."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.money import units_of
from dashboards.formats import money, since, time_html

NOON = datetime(2026, 3, 5, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("amount", "currency", "shown"),
    [
        ("0", "USD", "0.00 USD"),
        ("0.0004", "USD", "0.0004 USD"),
        ("0.00042317", "USD", "0.00042 USD"),
        ("0.000000000001", "USD", "0.000000000001 USD"),
        ("-0.0004", "USD", "-0.0004 USD"),
        ("0.05", "USD", "0.05 USD"),
        ("0.0567", "USD", "0.057 USD"),
        ("0.0999", "USD", "0.10 USD"),
        ("0.1234", "USD", "0.12 USD"),
        ("1234.5678", "USD", "1\u202f234.57 USD"),
        ("0.34", "JPY", "0.34 JPY"),
        ("12.34", "JPY", "12 JPY"),
    ],
)
def test_an_amount_keeps_its_significant_digits(amount: str, currency: str, shown: str) -> None:
    assert money(units_of(amount), currency) == shown


@given(st.integers(-(10**12), 10**12))
def test_what_is_not_nothing_is_not_shown_as_nothing_and_is_near(units: int) -> None:
    shown = Decimal(money(units, "USD").removesuffix(" USD").replace("\u202f", ""))
    exact = Decimal(units) / 10**12
    assert (shown == 0) == (units == 0)
    assert abs(shown - exact) <= max(abs(exact) * Decimal("0.05"), Decimal(0))


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        (timedelta(seconds=5), "5 s ago"),
        (timedelta(seconds=60), "1 minute ago"),
        (timedelta(minutes=3, seconds=40), "3 minutes ago"),
        (timedelta(hours=23, minutes=59), "23 hours ago"),
        (timedelta(days=6), "6 days ago"),
        (timedelta(days=7), "2026-02-26"),
        (timedelta(minutes=-5), "2026-03-05 12:05:00"),
    ],
)
def test_a_time_is_told_from_now(gone: timedelta, words: str) -> None:
    assert since(NOON - gone, NOON) == words
    html = str(time_html(NOON - gone, NOON))
    assert f">{words}</time>" in html
    assert f'datetime="{(NOON - gone).isoformat()}"' in html
