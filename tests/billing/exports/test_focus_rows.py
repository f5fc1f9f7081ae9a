"""Rows of the FOCUS export, column by column, of invoices that are written here."""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from billing.accounts.accounts import DEFAULT_SELLER_ID
from billing.accounts.tables import Seller
from billing.exports.focus import cost_and_usage
from billing.exports.focus.charges import split_billed
from billing.exports.focus.list_prices import ListPrices
from billing.exports.focus.tier_parts import points_of
from billing.exports.subjects import Period
from billing.invoicing.tables import CreditNote, Invoice, InvoiceLine
from billing.pricing import prices
from billing.pricing.pricing import Component
from billing.usage.tables import DailyUsage, HourlyLabelUsage
from core.money import PICO
from core.tenants.models import ApiKey, Project, Tenant
from core.tenants.scope import TenantScope, scope_of_operator
from tests.billing.conftest import START, Deployment
from tests.billing.exports.focus_reading import focus_of
from tests.billing.payments.provider_rows import invoice_row

DAY, CENT = timedelta(days=1), 10**10
END = START + timedelta(days=31)
JANUARY = Period(START, END)


@pytest.fixture
def books(lite: Deployment) -> Iterator[Session]:
    with lite.database.transaction() as session:
        session.get_one(Seller, DEFAULT_SELLER_ID).name = "Seller Ltd"
        session.get_one(Tenant, "acme").display_name = "Acme Inc"
        project = {"tenant_id": "acme", "name": "Search", "created_at": START}
        session.add(Project(id="p1", **project))
        yield session


def _draft(session: Session, number: int = 1, **fields: Any) -> None:
    invoice_row(session, number, sent=False, status="draft", **fields)


def _line(session: Session, minor: int, number: int = 1, **fields: Any) -> None:
    plain = {
        "kind": "usage",
        "component": "",
        "description": "x",
        "exact": minor * CENT,
        "position": 1,
    }
    span = {"starts_at": START, "ends_at": END}
    session.add(
        InvoiceLine(
            **plain | span | {"invoice_id": f"inv_{number:02}", "amount_minor": minor} | fields
        )
    )
    session.flush()


def _use(
    session: Session, day: datetime, key_id: str = "k1", table: Any = DailyUsage, **sums: Any
) -> None:
    row: dict[str, Any] = dict.fromkeys((each.name for each in table.__table__.columns), 0)
    row |= {"tenant_id": "acme", "at": day, "project_id": "p1", "key_id": key_id, "model": "demo"}
    row |= {"adapter": "pirate", "kind": "generation", "price_version": "pv", "currency": "USD"}
    row |= {"usage_period_id": "per_01", "bill_period_id": "per_01", **sums}
    session.execute(table.__table__.insert().values(**row))


def _rows(
    session: Session,
    scope: TenantScope | None = None,
    period: Period = JANUARY,
    version: str = "1.4",
) -> list[dict[str, Any]]:
    session.flush()
    found = focus_of(session, scope, period, version)
    return [{name: value for name, value in row.items() if value is not None} for row in found]


USAGE = {
    "component": "output",
    "unit": "token",
    "project_id": "p1",
    "model": "demo",
    "adapter": "pirate",
    "price_version": "pv",
    "usage_period_id": "per_01",
    "details": {"kind": "generation"},
    "description": "Output tokens",
}
OF_ALL = {
    "BillingAccountId": "acme",
    "BillingAccountName": "Acme Inc",
    "BillingAccountType": "Organization",
    "BillingCurrency": "USD",
    "BillingPeriodStart": START,
    "BillingPeriodEnd": END,
    "HostProviderName": "Seller Ltd",
    "InvoiceId": "TH-01",
    "InvoiceIssuerName": "Seller Ltd",
    "ServiceCategory": "AI and Machine Learning",
    "ServiceName": "Tollhouse inference",
    "ServiceProviderName": "Seller Ltd",
    "ServiceSubcategory": "Generative AI",
    "Tags": "{}",
    "x_InvoiceStatus": "draft",
}
COSTS = ("BilledCost", "EffectiveCost", "ContractedCost", "ListCost")


def _costs(billed: int) -> dict[str, int]:
    return dict.fromkeys(COSTS, billed)


def test_usage_is_a_row_for_each_day_and_key(books: Session) -> None:
    """0.03 of 3 tokens at 0.005 and 2 at 0.01, rounded by the largest remainder."""
    _draft(books)
    _line(books, 3, **USAGE, position=4)
    _use(books, START + DAY, output_tokens=2, output_amount=2 * CENT)
    _use(books, START, "k2", output_tokens=3, output_amount=CENT)
    _use(books, START + 2 * DAY, output_tokens=0, output_amount=0, input_tokens=5, input_amount=7)
    _use(books, START, "k3", output_tokens=9, output_amount=CENT, model="other")
    first, second = _rows(books)
    assert second == OF_ALL | _costs(2 * CENT) | {
        "ChargeCategory": "Usage",
        "ChargeDescription": "Output tokens",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": START + DAY,
        "ChargePeriodEnd": START + 2 * DAY,
        "ConsumedQuantity": 2 * PICO,
        "ConsumedUnit": "Tokens",
        "ContractedUnitPrice": CENT * 10**6,
        "InvoiceDetailId": "TH-01/line-4",
        "ListUnitPrice": CENT * 10**6,
        "PricingCategory": "Standard",
        "PricingQuantity": 2 * PICO // 10**6,
        "PricingUnit": "1000000 Tokens",
        "ResourceId": "pirate",
        "ResourceName": "pirate",
        "ResourceType": "LoRA adapter",
        "SkuId": "demo/output",
        "SkuMeter": "Output Tokens",
        "SkuPriceDetails": '{"x_ModelId":"demo","x_TokenDirection":"Output","x_AdapterId":"pirate"}',
        "SkuPriceId": "demo:pirate/output/standard",
        "SubAccountId": "p1",
        "SubAccountName": "Search",
        "SubAccountType": "Project",
        "Tags": '{"key":"k1","project":"Search"}',
        "x_KeyId": "k1",
        "x_LineKind": "usage",
        "x_LinePosition": 4,
        "x_PriceVersionId": "pv",
    }
    assert (first["ChargePeriodStart"], first["x_KeyId"], first["BilledCost"]) == (
        START,
        "k2",
        CENT,
    )


def test_usage_with_labels_is_a_row_of_its_own_with_them_among_the_tags(books: Session) -> None:
    _draft(books)
    _line(books, 4, **USAGE)
    _use(books, START, output_tokens=9, output_amount=4 * CENT)
    hours = ((1, "team=search", 2), (2, "team=search", 1), (1, "key=x,team=ads", 2))
    for hour, text, tokens in hours:
        at, cost = START + timedelta(hours=hour), tokens * CENT // 2
        sums = {"output_tokens": tokens, "output_amount": cost}
        _use(books, at, table=HourlyLabelUsage, labels=text, **sums)
    found = {
        row["Tags"]: (row["ConsumedQuantity"] // PICO, row["EffectiveCost"]) for row in _rows(books)
    }
    own = '"key":"k1","project":"Search"'
    assert found == {
        f"{{{own}}}": (4, 3 * CENT // 2),
        f'{{"team":"search",{own}}}': (3, 3 * CENT // 2),
        '{"key":"k1","team":"ads","project":"Search"}': (2, CENT),
    }


def test_each_component_has_its_own_days_and_late_usage_is_a_correction(books: Session) -> None:
    _draft(books)
    parts = {"usage_period_id": "per_00", "kind": "late_usage"}
    _line(books, 5, **USAGE | parts | {"component": "input"})
    _line(books, 7, **USAGE | parts | {"component": "cached_input"}, position=2)
    sums = {
        "input_tokens": 9,
        "cached_tokens": 4,
        "input_amount": 5 * CENT,
        "cached_amount": 7 * CENT,
    }
    _use(books, START, usage_period_id="per_00", **sums)
    found = [
        (row["SkuMeter"], row["ConsumedQuantity"] // PICO, row["BilledCost"], row["ChargeClass"])
        for row in _rows(books)
    ]
    assert found == [
        ("Input Tokens", 5, 5 * CENT, "Correction"),
        ("Cached Input Tokens", 4, 7 * CENT, "Correction"),
    ]


def test_usage_without_days_is_a_row_of_the_line(books: Session) -> None:
    """So that no amount of the invoice is lost."""
    _draft(books)
    _line(books, 3, **USAGE, quantity=4, exact=3 * CENT)
    (row,) = _rows(books)
    assert (row["BilledCost"], row["ConsumedQuantity"]) == (3 * CENT, 4 * PICO)
    assert "x_KeyId" not in row


@pytest.mark.parametrize(
    ("kind", "category", "frequency", "sku"),
    [
        ("adjustment", "Adjustment", "One-Time", None),
        ("included", "Credit", "Recurring", None),
        ("tax", "Tax", "One-Time", None),
        ("transfer", "Adjustment", "Recurring", None),
        ("child_markup", "Adjustment", "Recurring", None),
        ("metered", "Adjustment", "Usage-Based", None),
        ("markup", "Purchase", "Recurring", "organisation/markup"),
        ("child", "Purchase", "Recurring", "organisation/charges"),
        ("commitment", "Purchase", "One-Time", "plan/none/commitment-shortfall"),
        ("base_fee", "Purchase", "Recurring", "base_fee/change"),
        ("seats", "Purchase", "Recurring", "seats/change"),
        ("add_on", "Purchase", "Recurring", "add_on/change"),
    ],
)
def test_a_line_that_is_no_usage_is_one_row(
    books: Session, kind: str, category: str, frequency: str, sku: str | None
) -> None:
    """Without a price of its own what is bought is priced by its amount; the rest has no SKU."""
    _draft(books, label=None)
    _line(books, 5, kind=kind, exact=49_999_999_999, position=3, usage_period_id="per_01")
    (row,) = _rows(books)
    assert {name: row[name] for name in COSTS} == _costs(5 * CENT)
    assert (row["ChargeCategory"], row["ChargeFrequency"]) == (category, frequency)
    assert (row["InvoiceId"], row["InvoiceDetailId"]) == ("inv_01", "inv_01/line-3")
    assert "ChargeClass" not in row and "ConsumedQuantity" not in row
    if sku is None:
        assert not row.keys() & {"SkuId", "SkuPriceId", "PricingUnit", "PricingQuantity"}
        assert not row.keys() & {"ListUnitPrice", "ContractedUnitPrice", "PricingCategory"}
    else:
        assert (row["SkuId"], row["SkuPriceId"], row["PricingUnit"]) == (sku, f"{sku}/USD", "USD")
        assert (row["PricingQuantity"], row["ContractedUnitPrice"]) == (5 * CENT, PICO)


def test_included_usage_of_an_earlier_period_is_a_correction(books: Session) -> None:
    _draft(books)
    for position, (kind, ends) in enumerate(
        (
            ("included", START),
            ("included", START + timedelta(seconds=1)),
            ("commitment", START),
            ("base_fee", START),
        )
    ):
        _line(books, 1, kind=kind, ends_at=ends, starts_at=START - DAY, position=position)
    assert [row.get("ChargeClass") for row in _rows(books)] == [
        "Correction",
        None,
        "Correction",
        None,
    ]


def test_an_adjustment_of_its_own_open_period_is_no_correction(books: Session) -> None:
    _draft(books)
    for position, period in enumerate(("per_01", "per_00")):
        _line(books, 1, kind="adjustment", usage_period_id=period, position=position)
    assert [row.get("ChargeClass") for row in _rows(books)] == [None, "Correction"]


def test_a_credit_note_is_in_the_period_that_is_open_when_it_is_issued(books: Session) -> None:
    _draft(books, promo_minor=40)
    for number, net, tax in ((2, 100, 0), (1, 0, 19)):
        names = {
            "tenant_id": "acme",
            "seller_id": DEFAULT_SELLER_ID,
            "currency": "USD",
            "outcome": "due",
        }
        note = CreditNote(
            id=f"n{number}",
            number=number,
            label=f"CN-{number}",
            invoice_id="inv_01",
            net_minor=net,
            tax_minor=tax,
            reason="late",
            reference=f"n{number}",
            transaction_id="t",
            issued_at=END + DAY,
            **names,
        )
        books.add(note)
    (promo,) = _rows(books)
    assert {name: promo[name] for name in COSTS} == _costs(-40 * CENT)
    assert (promo["ChargeCategory"], promo["InvoiceDetailId"]) == ("Credit", "TH-01/promo")
    february = Period(END, END + timedelta(days=28))
    tax_, net_ = _rows(books, period=february)
    for row in (tax_, net_):
        assert (row["BillingPeriodStart"], row["BillingPeriodEnd"]) == (
            february.start,
            february.end,
        )
        assert (row["ChargePeriodStart"], row["ChargePeriodEnd"]) == (START, END)
        assert (row["ChargeClass"], row["x_CorrectsInvoiceId"]) == ("Correction", "TH-01")
        assert row["x_InvoiceStatus"] == "final"
    assert (tax_["InvoiceId"], tax_["ChargeCategory"], tax_["BilledCost"]) == (
        "CN-1",
        "Tax",
        -19 * CENT,
    )
    assert (net_["InvoiceId"], net_["ChargeCategory"], net_["BilledCost"]) == (
        "CN-2",
        "Adjustment",
        -100 * CENT,
    )


def test_invoices_of_billing_periods_that_overlap_the_time(
    books: Session, lite: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    lite_tenant = Tenant(id="birch", name="birch", display_name="Birch", created_at=START)
    books.add(lite_tenant)
    for number, start, end, tenant in (
        (1, START - DAY, START, "acme"),
        (2, START - DAY, START + timedelta(seconds=1), "acme"),
        (3, END - timedelta(seconds=1), END + DAY, "birch"),
        (4, END, END + DAY, "acme"),
        (6, START, END, "acme"),
    ):
        _draft(books, number, tenant_id=tenant, period_end=end)
        _line(books, 1, number, kind="base_fee")
        books.get_one(Invoice, f"inv_{number:02}").period_start = start
    for at_once in (50, 1):
        monkeypatch.setattr(cost_and_usage, "DOCUMENTS_AT_ONCE", at_once)
        assert [row["InvoiceId"] for row in _rows(books)] == ["TH-02", "TH-06", "TH-03"]
    own = _rows(books, scope_of_operator("acme"))
    assert [row["InvoiceId"] for row in own] == ["TH-02", "TH-06"]


def test_names_are_those_that_the_invoice_froze(books: Session) -> None:
    _draft(
        books,
        issued_by={"name": "Old Seller"},
        billed_to={"name": "", "account": "Old Acme", "projects": {"p1": "Old Search"}},
    )
    _line(books, 3, **USAGE, quantity=4)
    (row,) = _rows(books)
    assert row["InvoiceIssuerName"] == row["ServiceProviderName"] == "Old Seller"
    assert (row["BillingAccountName"], row["SubAccountName"]) == ("Old Acme", "Old Search")


def test_version_1_5_names_models_and_tokens_itself(books: Session) -> None:
    owner = {"tenant_id": "acme", "project_id": "p1", "secret_sha256": "s", "last_four": "1234"}
    books.flush()
    books.add(ApiKey(id="k1", name="nightly", created_at=START, member_id="mem_1", **owner))
    _draft(books)
    _line(books, 3, **USAGE | {"component": "cached_input"})
    _use(books, START, input_tokens=4, cached_tokens=4, cached_amount=3 * CENT)
    (row,) = _rows(books, version="1.5-draft")
    assert json.loads(row["SkuPriceDetails"]) == {
        "ModelId": "demo",
        "TokenDirection": "Input",
        "TokenCacheAction": "Read",
        "x_AdapterId": "pirate",
    }
    assert (row["CredentialId"], row["PrincipalId"]) == ("k1", "mem_1")
    assert json.loads(row["Tags"]) == {"key": "nightly", "project": "Search"}


@pytest.mark.parametrize(
    ("whole", "exact", "quantities", "parts"),
    [
        (10, [], [], []),
        (10, [3, 6], [1, 1], [3, 7]),
        (10, [0, 0], [1, 3], [3, 7]),
        (10, [0, 0], [0, 0], [5, 5]),
        (10, [12, -3], [1, 0], [13, -3]),
        (9, [12, -3], [0, 0], [12, -3]),
        (-9, [-12, 2], [1, 0], [-11, 2]),
        (-9, [-12, 4], [1, 0], [-13, 4]),
        (0, [0, 5], [0, 0], [0, 0]),
    ],
)
def test_how_a_rounded_amount_is_split(
    whole: int, exact: list[int], quantities: list[int], parts: list[int]
) -> None:
    assert split_billed(whole, exact, quantities) == parts


def test_the_list_price_of_what_was_used(session: Session, lite: Deployment) -> None:
    def _save(written: dict[str, Any], **fields: Any) -> str:
        draft = prices.PriceDraft("demo2", written, fields.pop("start", START), **fields)
        return prices.save(session, lite.clock, draft).id

    tiers = {"scheme": "graduated", "tiers": [{"up_to": 10, "price": "2"}, {"price": "1"}]}
    other = {"scheme": "graduated", "tiers": [{"up_to": 5, "price": "3"}, {"price": "1.5"}]}
    first = _save({"output": "0.50", "image": tiers, "request": "0.1"}, start=START)
    _save({"output": "0.60", "image": tiers, "request": "0.1"}, start=START + DAY)
    packs = {"scheme": "package", "size": 100, "price": "7"}
    own = _save(
        {"output": "0.30", "input": "1", "image": other, "request": packs},
        tenant_id="acme",
        discount_percent="25",
    )
    listed = ListPrices(prices.load_price_book(session))

    def _unit(component: str, version: str, point: int = 0, at: datetime = START) -> Any:
        found = listed.book.by_id[version]
        part = Component(component)
        rate = found.rates.get(part)
        return listed.unit(("demo2", "", part), found, points_of(rate)[point], at)

    assert _unit("output", own) == 500_000
    assert _unit("output", own, at=START + DAY) == 600_000
    assert _unit("output", first, at=START + DAY) == 500_000, "it is a list price"
    assert _unit("input", own) == 0, "the list has none"
    assert _unit("output", own, at=START - DAY) == 300_000, "nothing is listed"
    assert [_unit("image", own, tier) for tier in (0, 1)] == [2 * PICO, PICO], "of the same tier"
    assert _unit("request", own) == 100 * PICO // 10, "a package of a hundred"
