"""Exchange rates at their borders: which are taken, which one converts an amount, and what is shown."""

from datetime import UTC, date, datetime, timedelta

import pytest
from sqlalchemy.orm import Session

from billing.pricing import exchange_rates
from billing.pricing.exchange_rates import Converter, RateDraft, parse_csv
from billing.pricing.tables import ExchangeRate
from core.clock import FakeClock
from core.database import AmountTooLarge
from core.errors import BadRequest
from core.money import PICO

DAY = timedelta(days=1)
FIRST = date(2026, 1, 1)


def row(day: date, base: str, quote: str, rate: int) -> ExchangeRate:
    return ExchangeRate(day=day, base=base, quote=quote, rate=rate * PICO)


def record(session: Session, *drafts: tuple[str, str, str, str]) -> list[ExchangeRate]:
    made = [RateDraft(*draft) for draft in drafts]
    return exchange_rates.record(session, FakeClock(), made, "ann")


def test_an_amount_has_the_newest_rate_of_its_week_and_first_the_one_written_its_way() -> None:
    rows = [
        row(FIRST + 9 * DAY, "EUR", "USD", 9),
        row(FIRST + 7 * DAY, "USD", "EUR", 4),
        row(FIRST + 7 * DAY, "EUR", "USD", 3),
        row(FIRST + 7 * DAY, "GBP", "USD", 5),
        row(FIRST, "EUR", "USD", 2),
        row(FIRST, "USD", "CHF", 8),
    ]
    dollars = Converter("USD", rows)
    found = [dollars.convert(10, "EUR", FIRST + days * DAY) for days in (0, 6, 7, 8, 9, 16)]
    assert found == [20, 20, 30, 30, 90, 90]
    assert dollars.convert(10, "CHF", FIRST + 7 * DAY) == 1  # 10/8 is 1.25
    assert dollars.convert(12, "CHF", FIRST) == 2  # 1.5, away from zero
    assert dollars.convert(-12, "CHF", FIRST) == -2
    assert dollars.convert(7, "USD", FIRST) == 7
    assert dollars.convert(0, "EUR", FIRST - 99 * DAY) == 0
    used = [("2026-01-01", "EUR", "USD", "2"), ("2026-01-01", "USD", "CHF", "8")]
    used += [("2026-01-08", "EUR", "USD", "3"), ("2026-01-10", "EUR", "USD", "9")]
    names = ("day", "base", "quote", "rate")
    assert dollars.rates_used() == [dict(zip(names, each, strict=True)) for each in used]
    for currency, day in (("EUR", FIRST - DAY), ("CHF", FIRST + 8 * DAY), ("JPY", FIRST)):
        with pytest.raises(BadRequest, match=f"no rate of {currency} to USD for {day}"):
            dollars.convert(10, currency, day)


def test_the_rates_of_the_week_before_the_first_day_are_loaded_too(session: Session) -> None:
    days = ("2025-12-24", "2025-12-25", "2025-12-31", "2026-01-01")
    record(session, *((day, "EUR", "USD", "2") for day in days))
    record(session, ("2025-12-31", "USD", "GBP", "3"), ("2025-12-31", "GBP", "EUR", "4"))

    def loaded(currency: str, start: date, end: date) -> list[tuple[str, str]]:
        found = Converter.load(session, currency, start, end)
        return [(each.day.isoformat(), each.base + each.quote) for each in found.rows]

    of_euros = [("2026-01-01", "EURUSD"), ("2025-12-31", "EURUSD"), ("2025-12-25", "EURUSD")]
    assert sorted(loaded("usd", FIRST, FIRST)) == sorted([*of_euros, ("2025-12-31", "USDGBP")])
    assert loaded("usd", FIRST, FIRST)[0] == ("2026-01-01", "EURUSD")
    assert loaded("usd", FIRST, FIRST)[-1] == ("2025-12-25", "EURUSD")
    assert ("2026-01-01", "EURUSD") not in loaded("USD", FIRST - DAY, FIRST - DAY)
    assert sorted(loaded("GBP", FIRST, FIRST)) == [
        ("2025-12-31", "GBPEUR"),
        ("2025-12-31", "USDGBP"),
    ]
    with pytest.raises(BadRequest, match="The currency 'XYZ' is unknown"):
        Converter.load(session, "XYZ", FIRST, FIRST)


def test_rates_are_listed_newest_first_up_to_500(session: Session) -> None:
    first = date(2024, 1, 1)
    drafts = [((first + n * DAY).isoformat(), "EUR", "USD", "2") for n in range(500)]
    record(session, *drafts, ("2024-01-01", "CHF", "USD", "1.5"), ("2026-01-01", "GBP", "CHF", "3"))
    found = exchange_rates.listed(session)
    assert len(found) == 500
    assert (found[0].day, found[0].base) == (FIRST, "GBP")
    assert (found[1].day, found[-1].day) == (first + 499 * DAY, first + DAY)
    assert [each.base for each in exchange_rates.listed(session, 502)[-2:]] == ["CHF", "EUR"]
    assert exchange_rates.describe(found[0]) == {
        "day": "2026-01-01",
        "base": "GBP",
        "quote": "CHF",
        "rate": "3",
        "recorded_at": datetime(2026, 1, 1, tzinfo=UTC).isoformat(),
        "recorded_by": "ann",
    }


def test_a_rate_is_above_nothing_and_at_most_a_billion(session: Session) -> None:
    """More than SQLite stores, so that the database is what refuses a billion."""
    with pytest.raises(AmountTooLarge), session.begin_nested():
        record(session, ("2026-01-01", "EUR", "USD", "1000000000"))
    (lowest,) = record(session, ("2025-01-01", "eur", "usd", "0.000000000001"))
    assert (lowest.rate, lowest.base, lowest.quote) == (1, "EUR", "USD")
    for wrong in ("1000000000.000000000001", "0", "one"):
        with pytest.raises(BadRequest, match="is not a number above 0 with at most 12 decimals"):
            record(session, ("2026-01-01", "EUR", "USD", wrong))
    for draft, param in (
        (("2026-01-02", "EUR", "USD", "1"), "day"),
        (("2026-01-01", "XYZ", "USD", "1"), "base"),
        (("2026-01-01", "EUR", "XYZ", "1"), "quote"),
        (("2026-01-01", "EUR", "eur", "1"), "quote"),
    ):
        with pytest.raises(BadRequest) as refused:
            record(session, draft)
        assert refused.value.param == param


def test_a_file_names_its_lines_as_an_editor_does() -> None:
    text = " Day , BASE,quote,rate\n 2026-01-30 ,EUR, USD,1.0834\n\n2026-01-31,EUR,USD,1.09"
    assert parse_csv(text) == [
        RateDraft("2026-01-30", "EUR", "USD", "1.0834"),
        RateDraft("2026-01-31", "EUR", "USD", "1.09"),
    ]
    with pytest.raises(BadRequest, match="Line 5 has 5 fields instead of 4"):
        parse_csv(f"{text}\n1,2,3,4,5")
