"""Rows of the FOCUS export, column by column, of invoices that are written here."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from billing.accounts.accounts import DEFAULT_SELLER_ID
from billing.accounts.tables import Seller
from billing.exports import focus
from billing.exports.focus import focus_rows
from billing.exports.focus_columns import NAMES
from billing.exports.list_prices import ListPrices
from billing.exports.subjects import Period
from billing.invoicing.tables import CreditNote, Invoice, InvoiceLine
from billing.pricing import prices
from billing.usage.tables import DailyUsage
from core.tenants.models import Project, Tenant
from core.tenants.scope import TenantScope, scope_of_operator
from tests.billing.conftest import START, Deployment
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


def _use(session: Session, day: datetime, key_id: str = "k1", **sums: int) -> None:
    row: dict[str, Any] = dict.fromkeys((each.name for each in DailyUsage.__table__.columns), 0)
    row |= {"tenant_id": "acme", "at": day, "project_id": "p1", "key_id": key_id, "model": "demo"}
    row |= {"adapter": "pirate", "kind": "generation", "price_version": "pv", "currency": "USD"}
    row |= {"usage_period_id": "per_01", "bill_period_id": "per_01", **sums}
    session.execute(DailyUsage.__table__.insert().values(**row))  # type: ignore[attr-defined]


def _rows(
    session: Session, scope: TenantScope | None = None, period: Period = JANUARY
) -> list[dict[str, Any]]:
    session.flush()
    found = list(focus_rows(session, scope, period))
    return [
        {name: value for name, value in zip(NAMES, row, strict=True) if value is not None}
        for row in found
    ]


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
    "InvoiceId": "TH-01",
    "InvoiceIssuerName": "Seller Ltd",
    "PricingCurrency": "USD",
    "ProviderName": "Seller Ltd",
    "PublisherName": "Seller Ltd",
    "ServiceCategory": "AI and Machine Learning",
    "ServiceName": "Tollhouse inference",
    "ServiceSubcategory": "Generative AI",
    "Tags": "{}",
    "x_InvoiceStatus": "draft",
}


def _costs(billed: int, exact: int, listed: int | None = None) -> dict[str, int]:
    return {
        "BilledCost": billed,
        "ContractedCost": exact,
        "EffectiveCost": exact,
        "PricingCurrencyEffectiveCost": exact,
        "ListCost": exact if listed is None else listed,
    }


def test_usage_is_a_row_for_each_day_and_key(books: Session) -> None:
    """0.03 of 3,000,000,007 picounits a token, over two days, rounded by the largest remainder."""
    _draft(books)
    _line(books, 3, **USAGE, position=4)
    _use(books, START + DAY, output_tokens=2, output_amount=2 * CENT)
    _use(books, START, "k2", output_tokens=3, output_amount=CENT)
    _use(books, START + 2 * DAY, output_tokens=0, output_amount=0, input_tokens=5, input_amount=7)
    _use(books, START, "k3", output_tokens=9, output_amount=CENT, model="other")
    first, second = _rows(books)
    assert second == OF_ALL | _costs(2 * CENT, 2 * CENT) | {
        "ChargeCategory": "Usage",
        "ChargeDescription": "Output tokens",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": START + DAY,
        "ChargePeriodEnd": START + 2 * DAY,
        "ConsumedQuantity": 2,
        "ConsumedUnit": "token",
        "ContractedUnitPrice": CENT,
        "PricingCategory": "Standard",
        "PricingCurrencyContractedUnitPrice": CENT,
        "PricingQuantity": 2,
        "PricingUnit": "token",
        "ResourceId": "pirate",
        "ResourceName": "pirate",
        "ResourceType": "LoRA adapter",
        "SkuId": "demo/output",
        "SkuMeter": "output",
        "SkuPriceId": "pv/demo/output",
        "SubAccountId": "p1",
        "SubAccountName": "Search",
        "SubAccountType": "Project",
        "x_KeyId": "k1",
        "x_LineKind": "usage",
        "x_LinePosition": 4,
    }
    assert (first["ChargePeriodStart"], first["x_KeyId"], first["BilledCost"]) == (
        START,
        "k2",
        CENT,
    )
    assert first["PricingQuantity"] == 3 and "ContractedUnitPrice" not in first, "it is not whole"


def test_a_day_that_only_lowers_the_price_is_a_row(books: Session) -> None:
    """Of a volume tier: the day has an amount of its own, and what it counts may be nothing."""
    _draft(books)
    _line(books, 3, **USAGE)
    _use(books, START, output_tokens=4, output_amount=5 * CENT)
    _use(books, START + DAY, output_tokens=0, output_amount=-2 * CENT)
    _use(books, START + 2 * DAY, output_tokens=1, output_amount=0)
    found = [(row["PricingQuantity"], row["EffectiveCost"]) for row in _rows(books)]
    assert found == [(4, 5 * CENT), (0, -2 * CENT), (1, 0)]


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
        (row["SkuMeter"], row["PricingQuantity"], row["EffectiveCost"], row["ChargeClass"])
        for row in _rows(books)
    ]
    assert found == [
        ("input", 5, 5 * CENT, "Correction"),
        ("cached_input", 4, 7 * CENT, "Correction"),
    ]


@pytest.mark.parametrize(
    ("kind", "category", "frequency", "corrects"),
    [
        ("adjustment", "Adjustment", "One-Time", True),
        ("base_fee", "Purchase", "Recurring", False),
        ("seats", "Purchase", "Recurring", False),
        ("add_on", "Purchase", "Recurring", False),
        ("commitment", "Purchase", "One-Time", False),
        ("included", "Credit", "Recurring", False),
        ("tax", "Tax", "One-Time", False),
        ("markup", "Purchase", "Recurring", False),
        ("transfer", "Adjustment", "Recurring", False),
        ("child", "Purchase", "Recurring", False),
        ("child_markup", "Adjustment", "Recurring", False),
    ],
)
def test_a_line_that_is_no_usage_is_one_row(
    books: Session, kind: str, category: str, frequency: str, corrects: bool
) -> None:
    _draft(books, label=None)
    _line(books, 5, kind=kind, quantity=2, unit="seat", exact=49_999_999_999, position=3)
    counted = {"PricingQuantity": 2, "PricingUnit": "seat"} if kind != "tax" else {}
    correction = {"ChargeClass": "Correction"} if corrects else {}
    assert _rows(books) == [
        OF_ALL
        | _costs(5 * CENT, 49_999_999_999)
        | counted
        | correction
        | {
            "InvoiceId": "inv_01",
            "ChargeCategory": category,
            "ChargeDescription": "x",
            "ChargeFrequency": frequency,
            "ChargePeriodStart": START,
            "ChargePeriodEnd": END,
            "x_LineKind": kind,
            "x_LinePosition": 3,
        }
    ]


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


def test_promotional_credit_and_credit_notes_are_rows_of_their_own(books: Session) -> None:
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
            issued_at=END,
            **names,
        )
        books.add(note)
    promo, tax_, net_ = _rows(books)
    span = {"ChargePeriodStart": START, "ChargePeriodEnd": END, "x_LinePosition": 0}
    assert promo == OF_ALL | span | _costs(-40 * CENT, -40 * CENT) | {
        "ChargeCategory": "Credit",
        "ChargeDescription": "Promotional credit",
        "ChargeFrequency": "One-Time",
        "x_LineKind": "promo",
    }
    noted = OF_ALL | span | {"ChargeDescription": "Credit note: late", "ChargeClass": "Correction"}
    noted |= {"ChargeFrequency": "One-Time", "x_CorrectsInvoiceId": "TH-01"}
    assert tax_ == noted | _costs(-19 * CENT, -19 * CENT) | {
        "InvoiceId": "CN-1",
        "ChargeCategory": "Tax",
        "x_LineKind": "tax",
    }
    assert net_ == noted | _costs(-100 * CENT, -100 * CENT) | {
        "InvoiceId": "CN-2",
        "ChargeCategory": "Adjustment",
        "x_LineKind": "credit_note",
    }


def test_invoices_that_overlap_the_time_and_are_not_void(
    books: Session, lite: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    lite_tenant = Tenant(id="birch", name="birch", display_name="Birch", created_at=START)
    books.add(lite_tenant)
    for number, start, end, status, tenant in (
        (1, START - DAY, START, "draft", "acme"),
        (2, START - DAY, START + timedelta(seconds=1), "draft", "acme"),
        (3, END - timedelta(seconds=1), END + DAY, "draft", "birch"),
        (4, END, END + DAY, "draft", "acme"),
        (5, START, END, "void", "acme"),
        (6, START, END, "draft", "acme"),
    ):
        _draft(books, number, tenant_id=tenant, period_end=end)
        _line(books, 1, number, kind="base_fee")
        change = update(Invoice).where(Invoice.id == f"inv_{number:02}")
        books.execute(change.values(period_start=start))
        if status == "void":
            books.execute(change.values(status="void"))
    for at_once in (50, 1):
        monkeypatch.setattr(focus, "INVOICES_AT_ONCE", at_once)
        assert [row["InvoiceId"] for row in _rows(books)] == ["TH-02", "TH-06", "TH-03"]
    own = _rows(books, scope_of_operator("acme"))
    assert [row["InvoiceId"] for row in own] == ["TH-02", "TH-06"]


@pytest.mark.parametrize(
    ("whole", "exact", "quantities", "parts"),
    [
        (10, [], [], []),
        (10, [3, 6], [1, 1], [3, 7]),
        (10, [0, 0], [1, 3], [3, 7]),
        (10, [0, 0], [0, 0], [5, 5]),
        (10, [12, -3], [1, 0], [13, -3]),
        (9, [12, -3], [0, 0], [12, -3]),
        (0, [0, 5], [0, 0], [0, 0]),
    ],
)
def test_how_a_rounded_amount_is_split(
    whole: int, exact: list[int], quantities: list[int], parts: list[int]
) -> None:
    assert focus._split(whole, exact, quantities) == parts


def test_the_list_price_of_what_was_used(session: Session, lite: Deployment) -> None:
    def _save(written: dict[str, Any], **fields: Any) -> str:
        draft = prices.PriceDraft("demo2", written, fields.pop("start", START), **fields)
        return prices.save(session, lite.clock, draft).id

    tiers = {"scheme": "graduated", "tiers": [{"up_to": 10, "price": "2"}, {"price": "1"}]}
    first = _save({"output": "0.50", "image": tiers}, start=START)
    _save({"output": "0.60", "image": tiers}, start=START + DAY)
    own = _save(
        {"output": "0.30", "input": "1", "image": tiers}, tenant_id="acme", discount_percent="25"
    )
    listed = ListPrices(prices.load_price_book(session))

    def _price(
        component: str, version: str, quantity: int, exact: int, at: datetime = START
    ) -> Any:
        line = InvoiceLine(model="demo2", adapter="", price_version=version, component=component)
        return listed.price(line, at, quantity, exact)

    assert _price("output", own, 3, 1) == (500_000, 1_500_000)
    assert _price("output", own, 3, 1, START + DAY) == (600_000, 1_800_000)
    assert _price("output", first, 3, 1, START + DAY) == (500_000, 1_500_000), "it is a list price"
    assert _price("input", own, 3, 9) == (0, 0), "the list has none"
    assert _price("output", own, 3, 900_000, START - DAY) == (300_000, 900_000), "nothing is listed"
    assert _price("image", own, 20, 75) == (None, 100), "75 after a quarter less"
    assert _price("image", own, 20, 76) == (None, 101)
    assert _price("output", "gone", 3, 7) == (None, 7)
