"""Taxes, tax ids, periods and open amounts at their borders; every expected value is by hand."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.tax_ids import check_region, check_tax_id, country_of, eu_country
from billing.invoicing import open_amounts
from billing.invoicing.recognition import Deferred, Part, months
from billing.invoicing.tables import Invoice
from billing.ledger.ledger import AccountKind, Entry
from billing.periods import period_around, zone_of
from billing.taxes.tables import TaxRate
from billing.taxes.tax_rates import RateTable, add_rate
from billing.taxes.taxes import (
    Buyer,
    Certificate,
    Supply,
    Tax,
    TaxRequest,
    Treatment,
    merged,
    share,
)
from core.errors import BadRequest, NotFound
from core.money import Money
from tests.billing.conftest import START

DAY, MOMENT = timedelta(days=1), timedelta(microseconds=1)
GERMAN, FRENCH = "DE136695976", "FR40303265045"  # published examples of valid ids


@pytest.mark.parametrize(
    ("minor", "ppm", "expected"),
    [
        (50, 10_000, 1),
        (49, 10_000, 0),
        (-50, 10_000, -1),
        (-49, 10_000, 0),
        (0, 190_000, 0),
        (1000, 190_000, 190),
    ],
)
def test_a_share_is_rounded_half_away_from_zero(minor: int, ppm: int, expected: int) -> None:
    assert share(minor, ppm) == expected


def test_a_certificate_covers_its_time_and_place() -> None:
    end = START + DAY
    whole = Certificate("n", "", START, None)
    country = Certificate("n", "US", START, end)
    part = Certificate("n", "US-NY", START, end)
    times = (START - MOMENT, START, end - MOMENT, end)
    assert [country.covers("US-NY", at) for at in times] == [False, True, True, False]
    assert [whole.covers("DE", at) for at in times] == [False, True, True, True]
    assert [country.covers(each, START) for each in ("US", "US-CA", "DE", "")] == [
        True,
        True,
        False,
        False,
    ]
    assert [part.covers(each, START) for each in ("US", "US-CA", "US-NY")] == [False, False, True]


@pytest.mark.parametrize(
    ("seller", "region", "tax_id", "treatment", "proof"),
    [
        ("DE", "FR", FRENCH, "reverse_charge", FRENCH),
        ("DE", "FR", GERMAN, "standard", ""),
        ("DE", "FR", "", "standard", ""),
        ("DE", "DE", GERMAN, "standard", ""),
        ("FR", "DE-BY", GERMAN, "reverse_charge", GERMAN),
        ("US", "DE", GERMAN, "standard", ""),
        ("DE", "US-NY", "", "standard", ""),
        ("", "DE", GERMAN, "standard", ""),
    ],
)
def test_who_owes_the_tax(
    seller: str, region: str, tax_id: str, treatment: str, proof: str
) -> None:
    asked = TaxRequest("EUR", seller, Buyer(region, tax_id=tax_id), ())
    assert asked.treatment(START) == (Treatment(treatment), proof)


def test_an_exempt_buyer_and_the_first_certificate_in_force() -> None:
    shown = (Certificate("old", "", START - DAY, START), Certificate("new", "", START, None))
    asked = TaxRequest("EUR", "DE", Buyer("FR", tax_id=FRENCH, certificates=shown), ())
    assert asked.treatment(START - MOMENT) == (Treatment.EXEMPT, "old")
    assert asked.treatment(START) == (Treatment.EXEMPT, "new")
    always = TaxRequest("EUR", "DE", Buyer("FR", exempt=True, certificates=shown), ())
    assert always.treatment(START) == (Treatment.EXEMPT, "")


def test_how_a_tax_is_printed_and_merged() -> None:
    plain = Tax("VAT", 190_000, 100, 19)
    exempt = Tax("VAT", 0, 100, 0, Treatment.EXEMPT, "C-1")
    bare = Tax("VAT", 0, 100, 0, Treatment.EXEMPT)
    reverse = Tax("VAT", 0, 5, 0, Treatment.REVERSE_CHARGE, GERMAN)
    assert [each.description for each in (plain, exempt, bare, reverse)] == [
        "VAT",
        "VAT: exempt, certificate C-1",
        "VAT: exempt",
        f"VAT: reverse charge, the recipient owes the tax; tax id {GERMAN}",
    ]
    again = Tax("VAT", 190_000, -40, -8)
    assert merged([plain, exempt, again, reverse, bare, reverse]) == [
        Tax("VAT", 190_000, 60, 11),
        exempt,
        Tax("VAT", 0, 10, 0, Treatment.REVERSE_CHARGE, GERMAN),
        bare,
    ]


def test_rates_in_force_at_the_time_of_each_supply(session: Session) -> None:
    first = add_rate(session, "DE", "VAT", 190_000, START)
    second = add_rate(session, "DE", "VAT", 160_000, START + DAY)
    add_rate(session, "DE", "City", 10_000, START)
    add_rate(session, "FR", "TVA", 200_000, START)
    assert (first.effective_to, second.effective_to) == (START + DAY, None)
    kept = (first.region, first.name, first.rate_ppm, first.effective_from)
    assert kept == ("DE", "VAT", 190_000, START)

    def _taxes(*supplies: tuple[datetime, int], **buyer: Any) -> list[Tax]:
        asked = tuple(Supply(at, net) for at, net in supplies)
        return RateTable(session).taxes(TaxRequest("EUR", "DE", Buyer("DE", **buyer), asked))

    assert _taxes((START - MOMENT, 100)) == []
    assert _taxes((START, 100), (START + DAY - MOMENT, 50), (START + DAY, 10)) == [
        Tax("City", 10_000, 160, 2),
        Tax("VAT", 190_000, 150, 29),
        Tax("VAT", 160_000, 10, 2),
    ]
    assert _taxes((START, 100), (START, -100)) == []
    assert _taxes((START, 100), exempt=True) == [
        Tax("City", 0, 100, 0, Treatment.EXEMPT),
        Tax("VAT", 0, 100, 0, Treatment.EXEMPT),
    ]


def test_a_rate_is_up_to_everything_and_later_than_the_last(session: Session) -> None:
    assert add_rate(session, "DE", "None", 0, START).rate_ppm == 0
    assert add_rate(session, "DE", "All", 1_000_000, START).rate_ppm == 1_000_000
    for ppm, said in ((-1, "rate is -0.0001 percent"), (1_000_001, "rate is 100 percent")):
        with pytest.raises(BadRequest, match=said) as told:
            add_rate(session, "DE", "Other", ppm, START)
        assert told.value.param == "rate"
    with pytest.raises(BadRequest, match="All in DE has a rate from 2026-01-01 on") as late:
        add_rate(session, "DE", "All", 5, START)
    assert late.value.param == "effective_from"
    add_rate(session, "DE", "All", 5, START + MOMENT)
    add_rate(session, "FR", "All", 5, START)
    assert len(session.scalars(select(TaxRate)).all()) == 4


def test_regions_and_tax_ids() -> None:
    assert [check_region(each) for each in (" de ", "us-ny", "FR-2A1")] == ["DE", "US-NY", "FR-2A1"]
    for wrong in ("D", "DEU", "DE-", "DE-ABCD", ""):
        with pytest.raises(BadRequest, match="it must be a country") as told:
            check_region(wrong)
        assert told.value.param == "tax_region"
    assert country_of("US-NY") == "US"
    for written, region, kept in (
        ("  ", "DE", ""),
        ("", "", ""),
        ("136695976", "DE", GERMAN),
        ("de 136.695-976", "DE-BY", GERMAN),
        ("094259216", "GR", "EL094259216"),
        ("GR094259216", "GR", "EL094259216"),
        ("EL 094259216", "GR", "EL094259216"),
        ("04-2103594", "US-NY", "042103594"),
        (" any thing ", "AQ", "any thing"),
    ):
        assert check_tax_id(written, region) == kept
    for written, region, said in (
        ("DE136695977", "DE", "which is not valid in DE"),
        (GERMAN, "FR", "which is not valid in FR"),
        (GERMAN, "", "but the account has no tax_region"),
    ):
        with pytest.raises(BadRequest, match=said) as told:
            check_tax_id(written, region)
        assert told.value.param == "tax_id"
    ids = (GERMAN, FRENCH, "EL094259216", "DE136695977", "CHE107787577", "")
    assert [eu_country(each) for each in ids] == ["DE", "FR", "GR", None, None, None]


@pytest.mark.parametrize(
    ("at", "anchor", "zone", "start", "end"),
    [
        ("2026-01-15T00:00", 15, "UTC", "2026-01-15T00:00", "2026-02-15T00:00"),
        ("2026-01-14T23:59", 15, "UTC", "2025-12-15T00:00", "2026-01-15T00:00"),
        ("2026-02-27T23:59", 31, "UTC", "2026-01-31T00:00", "2026-02-28T00:00"),
        ("2026-02-28T00:00", 31, "UTC", "2026-02-28T00:00", "2026-03-31T00:00"),
        ("2025-12-31T12:00", 1, "UTC", "2025-12-01T00:00", "2026-01-01T00:00"),
        ("2026-03-01T00:00", 1, "UTC", "2026-03-01T00:00", "2026-04-01T00:00"),
        ("2026-02-10T00:00", 11, "UTC", "2026-01-11T00:00", "2026-02-11T00:00"),
        ("2026-03-31T21:59", 1, "Europe/Berlin", "2026-02-28T23:00", "2026-03-31T22:00"),
        ("2026-03-31T22:00", 1, "Europe/Berlin", "2026-03-31T22:00", "2026-04-30T22:00"),
    ],
)
def test_the_period_around_a_moment(at: str, anchor: int, zone: str, start: str, end: str) -> None:
    moment, *bounds = (
        datetime.fromisoformat(each).replace(tzinfo=UTC) for each in (at, start, end)
    )
    assert period_around(moment, anchor, zone) == tuple(bounds)


def test_time_zones_by_name() -> None:
    assert zone_of("UTC") is UTC and str(zone_of("Europe/Berlin")) == "Europe/Berlin"
    for wrong in ("Mars/Base", "../etc/passwd", ""):
        with pytest.raises(BadRequest, match="There is no time zone"):
            zone_of(wrong)


def test_the_months_that_earn_a_fee() -> None:
    def _at(year: int, month: int, day: int = 1) -> datetime:
        return datetime(year, month, day, tzinfo=UTC)

    assert list(months(_at(2026, 11, 16), _at(2027, 1, 1))) == [
        ("2026-11", _at(2026, 12)),
        ("2026-12", _at(2027, 1)),
    ]
    assert list(months(_at(2026, 11), _at(2026, 11))) == []
    line: Any = type("Line", (), {})()
    line.exact, line.starts_at, line.ends_at = 100, _at(2026, 1, 31), _at(2026, 3, 3)
    # Of 31 days one is January's, 28 are February's and two March's; each is rounded down by what came.
    assert Deferred(line, None).parts() == [  # type: ignore[arg-type]
        Part("2026-01", _at(2026, 2), 3),
        Part("2026-02", _at(2026, 3), 90),
        Part("2026-03", _at(2026, 4), 7),
    ]


def _invoice(**fields: Any) -> Invoice:
    plain = {
        "status": "final",
        "currency": "USD",
        "due_minor": 100,
        "paid_minor": 0,
        "credited_minor": 0,
    }
    return Invoice(**plain | fields)


def _entries(entries: tuple[Entry, ...]) -> list[tuple[AccountKind, int]]:
    return [(each.account, each.money.units // 10**10) for each in entries]


@pytest.mark.parametrize(
    ("fields", "unpaid", "left"),
    [
        ({}, 100, 100),
        ({"paid_minor": 30, "credited_minor": 20}, 50, 50),
        ({"paid_minor": 130}, -30, -30),
        ({"status": "uncollectible", "paid_minor": 30}, 70, 0),
        ({"status": "draft"}, 0, 0),
        ({"status": "void"}, 0, 0),
        ({"status": "paid", "paid_minor": 100}, 0, 0),
    ],
)
def test_what_is_open_of_an_invoice(fields: dict[str, Any], unpaid: int, left: int) -> None:
    invoice = _invoice(**fields)
    assert (open_amounts.unpaid_minor(invoice), open_amounts.open_minor(invoice)) == (unpaid, left)


def test_a_payment_covers_and_its_return_opens_again() -> None:
    cash, owed, bad = AccountKind.CASH, AccountKind.RECEIVABLE, AccountKind.BAD_DEBT
    invoice = _invoice()
    part, entries = open_amounts.cover(invoice, 99, START)
    assert (part, _entries(entries)) == (99, [(cash, 99), (owed, -99)])
    assert (invoice.status, invoice.settled_at) == ("final", None)
    assert open_amounts.cover(invoice, 0, START) == (0, ())
    part, entries = open_amounts.cover(invoice, 5, START)
    assert (part, invoice.status, invoice.settled_at) == (1, "paid", START)
    assert open_amounts.cover(invoice, 5, START) == (0, ())
    assert open_amounts.uncover(invoice, 0, START) == () and invoice.status == "paid"
    back = open_amounts.uncover(invoice, 1, START + DAY)
    assert _entries(back) == [(owed, 1), (cash, -1)]
    assert (invoice.status, invoice.settled_at, invoice.paid_minor) == ("final", None, 99)
    lost = _invoice(status="uncollectible")
    part, entries = open_amounts.cover(lost, 40, START)
    assert _entries(entries) == [(cash, 40), (bad, -40)] and lost.status == "uncollectible"
    assert _entries(open_amounts.uncover(lost, 40, START)) == [(bad, 40), (cash, -40)]
    open_amounts.cover(lost, 100, START)
    assert (lost.status, lost.settled_at) == ("paid", START)
    written = open_amounts._money(_invoice(currency="JPY"), 7)
    assert written == Money(7 * 10**12, "JPY")


def test_an_invoice_that_is_not_there_is_named(session: Session) -> None:
    with pytest.raises(NotFound, match="There is no invoice 'inv_none'"):
        open_amounts.locked_invoice(session, "inv_none")
