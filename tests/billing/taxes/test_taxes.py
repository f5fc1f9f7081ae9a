"""Taxes on invoices: the rate of the service's time, returned tax, certificates, ids, and a service
that is asked outside the transaction."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from billing.accounts import tax_ids
from billing.accounts.tables import BillingAccount, Seller
from billing.invoicing import invoice_run, invoices
from billing.invoicing.printing import as_html
from billing.invoicing.views import invoice_json
from billing.ledger import credits, ledger
from billing.ledger.ledger import AccountKind
from billing.rating import rerating
from billing.subscriptions import subscriptions
from billing.subscriptions.tables import Plan
from billing.taxes import tax_exemptions, tax_rates
from billing.taxes.tables import TaxRate
from billing.taxes.taxes import Tax, TaxRequest
from core.errors import BadRequest, NotFound
from core.money import Money, units_of
from tests.billing.conftest import START, Deployment
from tests.billing.invoicing.test_invoices import clean

DAY = timedelta(days=1)
FEBRUARY = START + 31 * DAY
TEN = {
    "input_tokens": 0,
    "cached_tokens": 0,
    "output_tokens": 16_666_667,
}  # 10.00 at 0.60 a million


def taxed(made: Deployment, region: str = "DE", **account: Any) -> None:
    with made.database.transaction() as session:
        row = session.get_one(BillingAccount, "acme")
        for name, value in {"tax_region": region, **account}.items():
            setattr(row, name, value)
        session.get_one(Seller, row.seller_id).tax_region = "DE"
        tax_rates.add_rate(session, region, "VAT", 160_000, START - 400 * DAY)


def finals(made: Deployment, **options: Any) -> list[dict[str, Any]]:
    result = invoice_run.run(made.database, made.clock, current=False, **options)
    assert not result.failed, result.failed
    with made.database.read() as session:
        return [invoice_json(session, invoices.get(session, each)) for each in result.finalised]


def taxes_of(document: dict[str, Any]) -> list[tuple[int, int]]:
    """(rate, minor units) of each tax line."""
    lines = [line for line in document["lines"] if line["kind"] == "tax"]
    return [(line["details"]["rate_ppm"], int(line["billed"]["minor"])) for line in lines]


def test_a_rate_that_begins_when_the_period_ends_is_the_next_periods(lite: Deployment) -> None:
    taxed(lite)
    with lite.database.transaction() as session:
        tax_rates.add_rate(session, "DE", "VAT", 190_000, FEBRUARY)
    lite.record(lite.event(**TEN))
    lite.clock.advance(days=40)
    lite.record(lite.event(**TEN))
    assert [taxes_of(each) for each in finals(lite)] == [[(160_000, 160)]]
    lite.clock.advance(days=31)
    assert [taxes_of(each) for each in finals(lite)] == [[(190_000, 190)]]
    clean(lite)


def test_late_usage_has_the_rate_of_the_period_of_its_use(lite: Deployment) -> None:
    taxed(lite)
    with lite.database.transaction() as session:
        tax_rates.add_rate(session, "DE", "VAT", 190_000, FEBRUARY)
    lite.record(lite.event(**TEN))
    lite.clock.advance(days=40)
    finals(lite)
    lite.record(lite.event(occurred_at=START + DAY, **TEN), lite.event(**TEN))
    lite.rate()
    lite.clock.advance(days=31)
    (document,) = finals(lite)
    assert taxes_of(document) == [(160_000, 160), (190_000, 190)]
    assert document["total"]["minor"] == 2000 + 350
    clean(lite)


def test_a_negative_net_returns_its_tax_to_the_wallet(deployment: Deployment) -> None:
    taxed(deployment)
    wrong = deployment.price({"output": "5.00"}, model="slip")
    plain = {"model": "slip", "price_version": wrong.id, "output_tokens": 2_000_000}
    deployment.record(deployment.event(**plain))
    deployment.clock.advance(days=40)
    (document,) = finals(deployment)
    assert document["total"]["minor"] == 1160
    right = deployment.price({"output": "2.00"}, model="slip")
    with deployment.database.transaction() as session:
        wanted = rerating.Request(wrong.id, right.id, START, FEBRUARY)
        rerating.post_all(session, deployment.clock, wanted)
    deployment.clock.advance(days=31)
    (document,) = finals(deployment)
    assert taxes_of(document) == [(160_000, -96)]
    assert document["total"]["minor"] == -696
    with deployment.database.read() as session:
        assert ledger.balance(session, "acme", AccountKind.PREPAID, "USD") == -units_of("6.96")
        assert ledger.balance(session, "acme", AccountKind.TAX, "USD") == -units_of("0.64")
    clean(deployment)


def test_promotional_credit_lowers_what_is_taxed(lite: Deployment) -> None:
    taxed(lite)
    with lite.database.transaction() as session:
        credits.grant(
            session,
            tenant_id="acme",
            kind="promo",
            money=Money(units_of("4")),
            reference="welcome",
            at=lite.clock.now(),
        )
    lite.record(lite.event(**TEN))
    lite.clock.advance(days=40)
    (document,) = finals(lite)
    assert taxes_of(document) == [(160_000, 96)]
    clean(lite)


def test_each_part_of_a_changed_plan_has_the_rate_of_its_end(lite: Deployment) -> None:
    taxed(lite)
    with lite.database.transaction() as session:
        tax_rates.add_rate(session, "DE", "VAT", 190_000, START + 20 * DAY)
        for name, fee in (("small", "31"), ("large", "62")):
            now = lite.clock.now()
            session.add(
                Plan(id=name, name=name, currency="USD", created_at=now, base_fee=units_of(fee))
            )
        session.flush()
        subscriptions.subscribe(session, "acme", "small", START)
        session.flush()
        subscriptions.subscribe(session, "acme", "large", START + 10 * DAY)
    lite.clock.advance(days=40)
    (document,) = finals(lite)
    # 10 of 31 days of 31.00 at 16 %, and 21 of 31 days of 62.00 at 19 %
    assert taxes_of(document) == [(160_000, 160), (190_000, 798)]
    clean(lite)


def test_certificates_and_reverse_charge_are_printed(lite: Deployment) -> None:
    taxed(lite, "FR", tax_id="FR40303265045")
    lite.record(lite.event(**TEN))
    lite.clock.advance(days=40)
    (document,) = finals(lite)
    assert taxes_of(document) == [(0, 0)] and document["tax"]["minor"] == 0
    page = as_html(document)
    assert "reverse charge" in page and "FR40303265045" in page
    with lite.database.transaction() as session:
        session.get_one(BillingAccount, "acme").tax_id = ""
        made = tax_exemptions.record(
            session,
            tenant_id="acme",
            number="EX-7",
            region="FR",
            valid_from=START,
            valid_to=None,
            recorded_by="usr",
            at=START,
        )
    lite.record(lite.event(**TEN))
    lite.clock.advance(days=31)
    (document,) = finals(lite)
    assert "certificate EX-7" in as_html(document) and document["tax"]["minor"] == 0
    with lite.database.transaction() as session:
        tax_exemptions.end(session, "acme", made.id, lite.clock.now())
    lite.record(lite.event(**TEN))
    lite.clock.advance(days=31)
    (document,) = finals(lite)
    assert taxes_of(document) == [(160_000, 160)]
    clean(lite)


# Numbers whose check digits are published as examples by the countries' own descriptions.
@pytest.mark.parametrize(
    ("written", "region", "kept"),
    [
        ("de 136.695.976", "DE", "DE136695976"),
        ("136695976", "DE", "DE136695976"),
        ("ATU13585627", "AT", "ATU13585627"),
        ("FR40303265045", "FR", "FR40303265045"),
        ("094259216", "GR", "EL094259216"),
        ("GR 094259216", "GR", "EL094259216"),
        ("GB 980 7806 84", "GB", "980780684"),
        ("91-1144442", "US-NY", "911144442"),
        ("anything", "AQ", "anything"),
        ("", "", ""),
    ],
)
def test_tax_ids_are_kept_in_one_form(written: str, region: str, kept: str) -> None:
    assert tax_ids.check_tax_id(written, region) == kept


@pytest.mark.parametrize(
    ("written", "region"),
    [
        ("DE136695978", "DE"),  # a wrong check digit
        ("DE136695976", "FR"),  # of another country
        ("ATU1358562", "AT"),  # too short
        ("07-1144442", "US"),  # no such prefix
        ("DE136695976", ""),  # a country is missing
    ],
)
def test_wrong_tax_ids_are_refused_with_the_next_step(written: str, region: str) -> None:
    with pytest.raises(BadRequest, match="tax_id") as caught:
        tax_ids.check_tax_id(written, region)
    assert caught.value.next_step and caught.value.param == "tax_id"


@pytest.mark.parametrize("region", ["Germany", "D", "DE-", "US-NYNY", "1A"])
def test_a_region_is_a_code(region: str) -> None:
    with pytest.raises(BadRequest, match="tax_region"):
        tax_ids.check_region(region)


class Counting:
    """A remote service that takes 10 %; `during` runs while it is asked."""

    def __init__(self, during: Any = lambda: None) -> None:
        self.asked: list[TaxRequest] = []
        self.during = during

    def taxes(self, request: TaxRequest) -> list[Tax]:
        self.asked.append(request)
        self.during()
        net = sum(each.net_minor for each in request.supplies)
        return [Tax("VAT", 100_000, net, net // 10)]


def test_a_remote_service_is_asked_once_and_outside_the_transaction(
    deployment: Deployment,
) -> None:
    taxed(deployment)
    deployment.record(deployment.event(**TEN))
    deployment.clock.advance(days=31, hours=1)  # in the grace period: a draft
    # Another connection writes the account meanwhile, which a held lock would stop.
    service = Counting(lambda: _touch(deployment))
    invoice_run.run(deployment.database, deployment.clock, current=False, taxes=service)
    invoice_run.run(deployment.database, deployment.clock, current=False, taxes=service)
    assert len(service.asked) == 1
    deployment.clock.advance(days=2)
    (document,) = finals(deployment, taxes=service)
    assert (taxes_of(document), len(service.asked)) == ([(100_000, 100)], 1)
    clean(deployment)


def _touch(deployment: Deployment) -> None:
    with deployment.database.transaction() as session:
        session.get_one(BillingAccount, "acme").email = "money@acme.invalid"


def test_an_invoice_whose_amounts_never_rest_is_left_for_the_next_run(lite: Deployment) -> None:
    taxed(lite)
    lite.record(lite.event(**TEN))
    lite.clock.advance(days=40)

    def _more() -> None:
        lite.record(lite.event(occurred_at=START + DAY, **TEN))
        lite.rate()

    result = invoice_run.run(lite.database, lite.clock, current=False, taxes=Counting(_more))
    assert result.finalised == []
    assert "while their taxes" in result.failed["acme"]
    assert len(finals(lite, taxes=Counting())) == 1


def test_a_rate_begins_after_the_one_before_it(lite: Deployment) -> None:
    with lite.database.transaction() as session:
        tax_rates.add_rate(session, "DE", "VAT", 190_000, START)
        for again in (START, START - DAY):
            with pytest.raises(BadRequest, match="has a rate from 2026-01-01 on") as refused:
                tax_rates.add_rate(session, "DE", "VAT", 160_000, again)
            assert refused.value.param == "effective_from"
        tax_rates.add_rate(session, "FR", "VAT", 200_000, START)
        tax_rates.add_rate(session, "DE", "LEVY", 10_000, START)
        rates = session.scalars(select(TaxRate).order_by(TaxRate.rate_ppm))
        assert [(each.rate_ppm, each.effective_to) for each in rates] == [
            (10_000, None),
            (190_000, None),
            (200_000, None),
        ]


@pytest.mark.parametrize("ppm", [-1, 1_000_001])
def test_a_rate_is_a_share(lite: Deployment, ppm: int) -> None:
    with (
        lite.database.transaction() as session,
        pytest.raises(BadRequest, match="must be 0 to 100 percent"),
    ):
        tax_rates.add_rate(session, "DE", "VAT", ppm, START)
    with lite.database.transaction() as session:  # both ends are rates
        tax_rates.add_rate(session, "DE", "VAT", 0, START)
        tax_rates.add_rate(session, "DE", "VAT", 1_000_000, START + DAY)


def _certificate(made: Deployment, valid_to: datetime | None = None) -> str:
    with made.database.transaction() as session:
        return tax_exemptions.record(
            session,
            tenant_id="acme",
            number="EX-7",
            region="DE",
            valid_from=START,
            valid_to=valid_to,
            recorded_by="usr",
            at=START,
        ).id


def test_a_certificate_is_ended_by_its_tenant_and_never_made_longer(lite: Deployment) -> None:
    lite.tenant("other")
    made = _certificate(lite, START + 5 * DAY)
    with lite.database.transaction() as session:
        for tenant_id, name in (("other", made), ("acme", "txe_none")):
            with pytest.raises(NotFound, match="no tax exemption"):
                tax_exemptions.end(session, tenant_id, name, START + DAY)
        assert (
            tax_exemptions.end(session, "acme", made, START + 9 * DAY).valid_to == START + 5 * DAY
        )
        assert (
            tax_exemptions.end(session, "acme", made, START + 2 * DAY).valid_to == START + 2 * DAY
        )
    for wrong in (START, START - DAY):
        with pytest.raises(BadRequest) as refused:
            _certificate(lite, wrong)
        assert refused.value.param == "valid_to"


@pytest.mark.parametrize(
    ("begins", "ends", "minor"),
    [
        (START, START + 31 * DAY, 0),
        # Usage is supplied until the period ends: one moment less and the last of it is taxed.
        (START, START + 31 * DAY - timedelta(microseconds=1), 160),
        (START + 31 * DAY, None, 160),
    ],
)
def test_a_certificate_covers_what_is_supplied_before_its_end(
    lite: Deployment, begins: datetime, ends: datetime | None, minor: int
) -> None:
    taxed(lite)
    with lite.database.transaction() as session:
        tax_exemptions.record(
            session,
            tenant_id="acme",
            number="EX-7",
            region="DE",
            valid_from=begins,
            valid_to=ends,
            recorded_by="usr",
            at=START,
        )
    lite.record(lite.event(**TEN))
    lite.clock.advance(days=40)
    (document,) = finals(lite)
    assert document["tax"]["minor"] == minor
