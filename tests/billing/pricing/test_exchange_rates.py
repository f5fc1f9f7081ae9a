"""Reports in one currency at the rate of the day, by figures worked out by hand.

One euro is 1.10 dollars on January 1st and 1.20 on the 5th. In dollars 1,000,000 input and output tokens
cost 0.75, in euros 3.00.
"""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from billing.accounts.accounts import DEFAULT_SELLER_ID
from billing.invoicing import invoice_run
from billing.invoicing.tables import Invoice
from billing.ledger import journal
from billing.pricing import engine_prices, exchange_rates
from billing.pricing.engine_prices import EnginePriceDraft
from billing.pricing.exchange_rates import Converter, RateDraft, parse_csv
from billing.pricing.tables import ExchangeRate
from billing.reports import margin, receivables, revenue
from billing.subscriptions import subscriptions
from billing.subscriptions.tables import Plan
from billing.usage import service_rollups
from billing.usage.day_range import Range
from core.clock import FakeClock
from core.errors import BadRequest, Conflict
from core.money import units_of
from tests.billing.conftest import START, Deployment

FIRST, FIFTH = date(2026, 1, 1), date(2026, 1, 5)
END = datetime(2026, 1, 10, tzinfo=UTC)


def test_totals_of_all_invoices_are_those_of_their_days(deployment: Deployment) -> None:
    """12.00 dollars of the 1st at 1.20 and 24.00 euros: 10.00 + 24.00; of dollars alone 10.00."""
    deployment.tenant("rhine", currency="EUR")
    deployment.clock.advance(days=8)
    rate(deployment, FIRST, "EUR", "USD", "1.20")
    rate(deployment, FIFTH, "EUR", "USD", "1.50")
    rows = (("acme", "USD", 1200, FIRST, "paid"), ("rhine", "EUR", 2400, FIFTH, "final"))
    with deployment.database.transaction() as session:
        for who, currency, total, day, status in rows:
            moment = datetime(day.year, day.month, day.day, 12, tzinfo=UTC)
            made = Invoice(
                id=f"inv_{who}",
                tenant_id=who,
                seller_id=DEFAULT_SELLER_ID,
                period_id=f"per_{who}",
                status=status,
                currency=currency,
                period_start=START,
                period_end=END,
                timezone="UTC",
                drafted_at=moment,
                final_at=moment,
                total_minor=total,
            )
            session.add(made)
    with deployment.database.read() as session:
        euros = converter(deployment, "EUR")
        assert receivables.first_day(session, END) == FIRST
        assert receivables.billed(session, END, euros) == 3400
        assert receivables.billed(session, END, euros, state="paid") == 1000
        assert receivables.billed(session, END, euros, search="rhine") == 2400


def rate(made: Deployment, day: date, base: str, quote: str, value: str, **options: bool) -> None:
    with made.database.transaction() as session:
        draft = RateDraft(day.isoformat(), base, quote, value)
        exchange_rates.record(session, made.clock, [draft], "ann", **options)


def converter(made: Deployment, currency: str, end: date = date(2026, 1, 10)) -> Converter:
    with made.database.read() as session:
        return Converter.load(session, currency, FIRST, end)


@pytest.fixture
def mixed(deployment: Deployment) -> Deployment:
    """0.75 dollars and 3.00 euros of usage on the 1st, and 3.00 euros on the 5th; 1,000 s of an engine
    at 3.60 euros an hour on the 1st."""
    deployment.tenant("rhine", currency="EUR")
    euros = deployment.price({"input": "1", "output": "2"}, currency="EUR")
    tokens = {"input_tokens": 10**6, "cached_tokens": 0, "output_tokens": 10**6, "waived_tokens": 0}
    rhine: dict[str, Any] = {"tenant_id": "rhine", "price_version": euros.id, **tokens}
    busy = {"busy_us": 10**9, "engine_id": "gpu"}
    deployment.record(deployment.event(**tokens), deployment.event(**rhine, **busy))
    deployment.clock.advance(days=4)
    deployment.record(deployment.event(**rhine))
    with deployment.database.transaction() as session:
        draft = EnginePriceDraft("*", "3.60", "EUR", START)
        engine_prices.save(session, deployment.clock, draft)
    deployment.rate()
    service_rollups.sum_all(deployment.database, deployment.clock)
    rate(deployment, FIRST, "EUR", "USD", "1.10")
    rate(deployment, FIFTH, "EUR", "USD", "1.20")
    return deployment


def test_the_margin_of_all_tenants_is_in_one_currency(mixed: Deployment) -> None:
    dollars = converter(mixed, "usd")
    with mixed.database.read() as session:
        before = journal.trial_balance(session)
        report = margin.read(session, START, END, ("tenant",), converter=dollars)
        assert journal.trial_balance(session) == before
    rows = {row.group["tenant"]: row for row in report.rows}
    # 3.00 at 1.10 and 3.00 at 1.20; the engine's 1.00 euro at 1.10.
    assert rows["rhine"].revenue == units_of("3.30") + units_of("3.60")
    assert rows["rhine"].cost == units_of("1.10")
    assert rows["acme"].revenue == units_of("0.75")
    assert margin.describe(report)["rates"] == [
        {"day": "2026-01-01", "base": "EUR", "quote": "USD", "rate": "1.1"},
        {"day": "2026-01-05", "base": "EUR", "quote": "USD", "rate": "1.2"},
    ]
    assert report.unpriced_us == {}


def test_a_pair_that_is_recorded_the_other_way_round_is_divided_by(mixed: Deployment) -> None:
    euros = converter(mixed, "EUR")
    with mixed.database.read() as session:
        report = margin.read(session, START, END, ("model",), converter=euros)
    # 0.75 / 1.10, to the picounit.
    assert report.total.revenue == units_of("6") + units_of("0.681818181818")
    assert report.total.cost == units_of("1")


def test_revenue_in_one_currency_is_rounded_once(mixed: Deployment) -> None:
    with mixed.database.read() as session:
        whole = revenue.read_in(session, Range(FIRST, FIFTH), converter(mixed, "USD"))
    assert (whole.currency, whole.used) == ("USD", units_of("7.65"))


def test_open_invoices_are_converted_at_the_rate_of_today(mixed: Deployment) -> None:
    for name, currency in (("acme", "USD"), ("rhine", "EUR")):
        with mixed.database.transaction() as session:
            fields = {"id": name, "name": name, "currency": currency, "grace_hours": 1}
            session.add(Plan(**fields, base_fee=units_of("10"), created_at=mixed.clock.now()))
            session.flush()
            subscriptions.subscribe(session, name, name, mixed.clock.now(), 0)
    mixed.clock.advance(days=40)
    assert not invoice_run.run(mixed.database, mixed.clock, current=False).failed
    today = mixed.clock.now().date()
    with pytest.raises(BadRequest, match="EUR to USD"):
        ageing(mixed, today)
    rate(mixed, today - timedelta(days=2), "EUR", "USD", "1.5")
    with mixed.database.read() as session:
        by_currency = {
            line["currency"]: line["total"]
            for line in receivables.ageing(session, mixed.clock.now())
        }
    (line,) = ageing(mixed, today)
    # The 27 days from the 5th of the 10.00 a month are 8.71: 9.46 dollars with the usage, 14.71 euros.
    assert by_currency == {"USD": 946, "EUR": 1471}
    assert line["currency"] == "USD" and line["total"] == 946 + 2207  # 14.71 × 1.5 = 22.065


def ageing(made: Deployment, today: date) -> list[dict[str, Any]]:
    with made.database.read() as session:
        found = Converter.load(session, "USD", today, today)
        return receivables.ageing(session, made.clock.now(), found)


def test_a_weekend_has_the_rate_of_the_days_before_but_not_of_another_week(
    mixed: Deployment,
) -> None:
    dollars = converter(mixed, "USD", date(2026, 1, 20))
    one = units_of("1")
    assert dollars.convert(one, "EUR", date(2026, 1, 4)) == units_of("1.10")
    assert dollars.convert(one, "EUR", date(2026, 1, 12)) == units_of("1.20")
    assert dollars.convert(one, "USD", date(2026, 1, 20)) == one
    assert dollars.convert(0, "JPY", date(2026, 1, 20)) == 0
    assert dollars.convert(-one, "EUR", FIRST) == -units_of("1.10")
    with pytest.raises(BadRequest, match="EUR to USD for 2026-01-13") as missing:
        dollars.convert(one, "EUR", date(2026, 1, 13))
    assert "tollhouse price exchange-rate EUR USD" in missing.value.next_step
    assert missing.value.code == "exchange_rate_missing"


def test_a_recorded_rate_changes_only_on_request(lite: Deployment) -> None:
    rate(lite, FIRST, "EUR", "USD", "1.10")
    rate(lite, FIRST, "eur", "usd", "1.1")
    with pytest.raises(Conflict, match=r"1\.1 already"):
        rate(lite, FIRST, "EUR", "USD", "1.11")
    rate(lite, FIRST, "EUR", "USD", "1.11", replace=True)
    with lite.database.read() as session:
        (row,) = exchange_rates.listed(session)
    assert (row.rate, row.recorded_by) == (units_of("1.11"), "ann")


@pytest.mark.parametrize(
    ("draft", "named"),
    [
        (("yesterday", "EUR", "USD", "1"), "day"),
        (("2026-01-02", "EUR", "USD", "1"), "future"),
        (("2026-01-01", "ABC", "USD", "1"), "ABC"),
        (("2026-01-01", "EUR", "EUR", "1"), "both EUR"),
        (("2026-01-01", "EUR", "USD", "0"), "above 0"),
        (("2026-01-01", "EUR", "USD", "-1"), "above 0"),
        (("2026-01-01", "EUR", "USD", "NaN"), "above 0"),
        (("2026-01-01", "EUR", "USD", "1.0000000000001"), "12 decimals"),
        (("2026-01-01", "EUR", "USD", "1e30"), "above 0"),
    ],
)
def test_a_wrong_rate_is_refused(
    lite: Deployment, clock: FakeClock, draft: tuple[str, str, str, str], named: str
) -> None:
    with pytest.raises(BadRequest, match=named), lite.database.transaction() as session:
        exchange_rates.record(session, clock, [RateDraft(*draft)], "ann")


def test_a_file_is_recorded_as_a_whole_or_not_at_all(lite: Deployment) -> None:
    text = "\ufeffDay,base,quote,rate\r\n2026-01-01,EUR,USD,1.10\r\n\r\n2026-01-01,GBP,USD,x\r\n"
    with pytest.raises(BadRequest, match="'x'"), lite.database.transaction() as session:
        exchange_rates.record(session, lite.clock, parse_csv(text), "ann")
    with lite.database.read() as session:
        assert session.query(ExchangeRate).count() == 0
    with lite.database.transaction() as session:
        good = parse_csv(text.replace("x", "1.30"))
        assert len(exchange_rates.record(session, lite.clock, good, "ann")) == 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "day,base,quote,rate"),
        ("2026-01-01,EUR,USD,1.10", "day,base,quote,rate"),
        ("day,base,quote,rate\n", "no rates"),
        ("day,base,quote,rate\n2026-01-01,EUR,USD", "Line 2 has 3 fields"),
        ("day,base,quote,rate\n" + "1" * 200_000, "cannot be read as CSV"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(text: str, named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        parse_csv(text)
