"""Whoever knows the rates, one contract: our table, and Stripe's library over HTTP.

The rates, set in both: Germany 16 % until July 2020, then 19 %; France 20 %; New York 8.875 %.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from billing.payments.fake_stripe.server import FakeStripe
from billing.payments.fake_stripe.state import StripeState
from billing.payments.fake_stripe.taxes import Rate
from billing.payments.stripe.taxes import StripeTaxes
from billing.taxes import tax_rates
from billing.taxes.tax_rates import RateTable
from billing.taxes.taxes import Buyer, Certificate, Supply, Tax, TaxRequest, TaxService, Treatment
from core.clock import FakeClock
from core.database import Database
from core.errors import Conflict

CHANGE = datetime(2026, 7, 1, tzinfo=UTC)
BEFORE, AFTER = CHANGE - timedelta(microseconds=1), CHANGE
NOW = CHANGE + timedelta(days=10)
FRENCH = "FR40303265045"


def _table(database: Database) -> Iterator[TaxService]:
    with database.transaction() as session:
        for region, name, ppm, since in (
            ("DE", "VAT", 160_000, CHANGE - timedelta(days=400)),
            ("DE", "VAT", 190_000, CHANGE),
            ("FR", "VAT", 200_000, CHANGE - timedelta(days=400)),
            ("US-NY", "Sales tax", 88_750, CHANGE - timedelta(days=400)),
        ):
            tax_rates.add_rate(session, region, name, ppm, since)
        yield RateTable(session)


def _stripe() -> Iterator[TaxService]:
    clock = FakeClock(NOW)
    at = int(CHANGE.timestamp())
    rates = [
        Rate("DE", "vat", "16.0", until=at),
        Rate("DE", "vat", "19.0", since=at),
        Rate("FR", "vat", "20.0"),
        Rate("US-NY", "sales_tax", "8.875"),
    ]
    with FakeStripe(books=StripeState(clock, tax_rates=rates)) as stripe:
        yield StripeTaxes(clock, stripe.api_key, stripe.url)


@pytest.fixture(params=["table", "stripe"])
def service(request: pytest.FixtureRequest, sqlite_database: Database) -> Iterator[TaxService]:
    yield from _table(sqlite_database) if request.param == "table" else _stripe()


def ask(service: TaxService, buyer: Buyer, *supplies: tuple[datetime, int]) -> list[Tax]:
    made = tuple(Supply(at, net) for at, net in supplies)
    return service.taxes(TaxRequest("EUR", "DE", buyer, made))


@pytest.mark.parametrize(("net", "amount"), [(741, 141), (-741, -141), (1, 0), (3, 1), (-3, -1)])
def test_a_tax_is_rounded_half_away_from_zero_and_returned(
    service: TaxService, net: int, amount: int
) -> None:
    assert ask(service, Buyer("DE"), (AFTER, net)) == [Tax("VAT", 190_000, net, amount)]


def test_each_supply_has_the_rate_of_its_time(service: TaxService) -> None:
    assert ask(service, Buyer("DE"), (BEFORE, 10_000), (AFTER, 20_000), (AFTER, -5_000)) == [
        Tax("VAT", 160_000, 10_000, 1_600),
        Tax("VAT", 190_000, 15_000, 2_850),
    ]


def test_a_rate_may_have_a_fraction_of_a_percent(service: TaxService) -> None:
    buyer = Buyer("US-NY", postal_code="10001")
    assert ask(service, buyer, (AFTER, 10_000)) == [Tax("Sales tax", 88_750, 10_000, 888)]


def test_nothing_is_due_without_a_place_a_rate_or_a_net(service: TaxService) -> None:
    assert ask(service, Buyer(""), (AFTER, 10_000)) == []
    assert ask(service, Buyer("JP"), (AFTER, 10_000)) == []
    assert ask(service, Buyer("DE"), (AFTER, 0)) == []


def test_a_business_in_another_eu_country_owes_the_tax_itself(service: TaxService) -> None:
    (tax,) = ask(service, Buyer("FR", tax_id=FRENCH), (AFTER, 10_000))
    assert (tax.rate_ppm, tax.taxable_minor, tax.amount_minor) == (0, 10_000, 0)
    assert (tax.treatment, tax.proof) == (Treatment.REVERSE_CHARGE, FRENCH)
    assert "reverse charge" in tax.description and FRENCH in tax.description


def test_a_business_at_home_and_a_consumer_abroad_pay(service: TaxService) -> None:
    at_home = ask(service, Buyer("DE", tax_id="DE136695976"), (AFTER, 10_000))
    abroad = ask(service, Buyer("FR"), (AFTER, 10_000))
    assert [each.amount_minor for each in at_home + abroad] == [1_900, 2_000]


def test_a_certificate_exempts_what_was_supplied_while_it_was_valid(service: TaxService) -> None:
    held = Certificate("ST-120", "DE", CHANGE - timedelta(days=20), CHANGE)
    taxes = ask(service, Buyer("DE", certificates=(held,)), (BEFORE, 10_000), (AFTER, 10_000))
    assert [(each.treatment, each.amount_minor, each.proof) for each in taxes] == [
        (Treatment.EXEMPT, 0, "ST-120"),
        (Treatment.STANDARD, 1_900, ""),
    ]
    elsewhere = Certificate("X", "US", CHANGE - timedelta(days=20), None)
    assert ask(service, Buyer("DE", certificates=(elsewhere,)), (AFTER, 100))[0].amount_minor == 19


def test_an_exempt_account_pays_nothing(service: TaxService) -> None:
    (tax,) = ask(service, Buyer("DE", exempt=True), (AFTER, 10_000))
    assert (tax.treatment, tax.amount_minor) == (Treatment.EXEMPT, 0)


def test_an_address_that_stripe_cannot_place_names_what_to_correct() -> None:
    for service in _stripe():
        with pytest.raises(Conflict, match=r"US-NY.*postal_code"):
            ask(service, Buyer("US-NY"), (AFTER, 100))
