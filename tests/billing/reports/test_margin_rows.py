"""Margins of days that are written here, row by row; what a hand payment and a first customer are."""

from datetime import date, timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from billing.adjustments import onboarding
from billing.adjustments.onboarding import BillingDetails, Customer, Owner
from billing.payments.base import (
    Attempt,
    Bill,
    BillLine,
    Charge,
    Gone,
    InvoiceState,
    PaymentState,
    RefundState,
    Refused,
    Status,
    Transfer,
    UsageReport,
    Window,
)
from billing.payments.base import Customer as Buyer
from billing.payments.manual import ManualPayments
from billing.reports import margin
from billing.usage.tables import DailyEngineTime, DailyTenantUsage, DailyUsage
from core.errors import BadRequest
from core.tenants import passwords
from core.tenants.models import Tenant
from tests.billing.conftest import START, Deployment

DAY = timedelta(days=1)
HOUR_US = 3_600_000_000


def _used(session: Session, model: str, amount: int, **fields: Any) -> None:
    plain = {"tenant_id": "acme", "at": START, "currency": "USD"}
    counts = {"requests": 1, "input_tokens": 10, "cached_tokens": 4, "output_tokens": 5}
    session.add(DailyTenantUsage(model=model, amount=amount, **plain | counts | fields))
    session.flush()


def _busy(session: Session, model: str, busy_us: int, **fields: Any) -> None:
    plain = {"tenant_id": "acme", "at": START, "currency": "USD", "adapter": "", "engine_id": "e-1"}
    session.add(DailyEngineTime(model=model, busy_us=busy_us, answers=1, **plain | fields))
    session.flush()


def _rows(report: margin.MarginReport) -> list[tuple[Any, ...]]:
    names = ("requests", "tokens", "revenue", "busy_us", "unpriced_us", "cost")
    return [(*row.group.values(), *(getattr(row, name) for name in names)) for row in report.rows]


def test_the_most_earning_come_first_and_sums_are_of_the_days(session: Session) -> None:
    session.get_one(Tenant, "acme").name = "Acme Inc"
    _used(session, "b", 100)
    _used(session, "b", 50, at=START + DAY)
    _used(session, "a", 150, tenant_id="gone")
    _used(session, "c", 999, at=START + 2 * DAY)
    _used(session, "c", 999, at=START - DAY)
    _used(session, "c", 7, currency="EUR")
    _busy(session, "b", 30, engine_id="x-9")
    _busy(session, "d", 12, currency="EUR")
    _busy(session, "b", 99, at=START + 2 * DAY)
    report = margin.read(session, START, START + 2 * DAY)
    assert (report.currency, report.by) == ("USD", ("model",))
    assert _rows(report) == [("a", 1, 15, 150, 0, 0, 0), ("b", 2, 30, 150, 30, 30, 0)]
    assert report.unpriced_us == {"x-9": 30}
    both = margin.read(session, START, START + 2 * DAY, ("tenant", "model"))
    assert both.by == ("model", "tenant")
    assert [row[:2] for row in _rows(both)] == [("a", "gone"), ("b", "Acme Inc")]
    euros = margin.read(session, START, START + DAY, currency="EUR")
    assert _rows(euros) == [("c", 1, 15, 7, 0, 0, 0), ("d", 0, 0, 0, 12, 12, 0)]
    described = margin.describe(report)
    total = described.pop("total")
    assert described["unpriced_engines"] == [{"engine": "x-9", "engine_seconds": "0.000030"}]
    assert (described["object"], described["currency"], described["rates"]) == ("list", "USD", [])
    assert total == {
        "requests": 3,
        "tokens": 45,
        "revenue": {"amount": "0.0000000003", "units": "300", "currency": "USD"},
        "engine_seconds": "0.000030",
        "unpriced_engine_seconds": "0.000030",
        "engine_cost": {"amount": "0", "units": "0", "currency": "USD"},
        "margin": {"amount": "0.0000000003", "units": "300", "currency": "USD"},
    }


class Doubling:
    currency = "USD"

    def convert(self, units: int, currency: str, day: date) -> int:
        return units if currency == "USD" else 2 * units

    def rates_used(self) -> list[str]:
        return ["a rate"]


def test_with_a_converter_all_currencies_are_in_one_report(session: Session) -> None:
    _used(session, "a", 100)
    _used(session, "a", 7, currency="EUR")
    converter: Any = Doubling()
    report = margin.read(session, START, START + DAY, currency="JPY", converter=converter)
    assert (report.currency, _rows(report)) == ("USD", [("a", 2, 30, 114, 0, 0, 0)])
    assert margin.describe(report)["rates"] == ["a rate"]


def test_adapters_are_told_apart(session: Session) -> None:
    row: dict[str, Any] = dict.fromkeys((each.name for each in DailyUsage.__table__.columns), 0)
    texts = ("project_id", "key_id", "kind", "price_version", "usage_period_id", "bill_period_id")
    row |= dict.fromkeys(texts, "x")
    row |= {"tenant_id": "acme", "at": START, "model": "a", "currency": "USD", "amount": 5}
    for adapter in ("", "pirate"):
        made = row | {"adapter": adapter, "requests": 1}
        session.execute(DailyUsage.__table__.insert().values(**made))  # type: ignore[attr-defined]
    report = margin.read(session, START, START + DAY, ("adapter",))
    assert _rows(report) == [("", 1, 0, 5, 0, 0, 0), ("pirate", 1, 0, 5, 0, 0, 0)]
    for by, said in (((), "nothing"), (("model", "x" * 50), "x" * 40)):
        with pytest.raises(BadRequest, match=f"The margin cannot be grouped by {said}\\.") as told:
            margin.read(session, START, START + DAY, by)
        assert told.value.param == "by"


@pytest.mark.parametrize(
    ("microseconds", "shown"), [(0, "0.000000"), (1_234_567, "1.234567"), (HOUR_US, "3600.000000")]
)
def test_seconds_are_exact(microseconds: int, shown: str) -> None:
    assert margin.seconds(microseconds) == shown


BILL = Bill("inv_1", "TH-1", "acme", "USD", 100, (BillLine(1, "x", 100, START, START),))


def test_payments_by_hand_wait_for_a_person() -> None:
    bank = ManualPayments()
    assert (bank.name, bank.collects) == ("manual", False)
    assert bank.open_customer(Buyer("acme", "Acme"), Attempt("k")) == "acme"
    sent = InvoiceState("inv_1", "inv_1", "open", "USD", 100, 100)
    assert bank.send_invoice("acme", BILL, Attempt("k")) == sent
    assert bank.collect_invoice("inv_1", Attempt("k")) == sent == bank.invoice("inv_1")
    attempt = Attempt("l")
    for _ in range(2):
        lowered = bank.lower_invoice("inv_1", 99, "x", attempt)
        assert (lowered.remaining_minor, lowered.status) == (1, "open")
    assert attempt.progress == {"lowered": True}
    paid = bank.lower_invoice("inv_1", 2, "x", Attempt("m"))
    assert (paid.remaining_minor, paid.status) == (0, "paid")
    assert bank.lower_invoice("inv_1", 2, "x", Attempt("n")) == paid
    assert bank.close_invoice("inv_1", "void", Attempt("k")) == paid
    for how, status in (("void", "void"), ("paid_elsewhere", "paid"), ("uncollectible",) * 2):
        other = ManualPayments()
        other.send_invoice("acme", BILL, Attempt("k"))
        closed = other.close_invoice("inv_1", how, Attempt("k"))
        assert (closed.status, closed.remaining_minor) == (status, 0)
        assert other.invoice("inv_1") == closed
    charge = Charge("pay_1", "acme", "USD", 5, "x")
    waits = PaymentState("pay_1", Status.PENDING, 5, "USD", payment_id="pay_1")
    assert bank.charge("acme", charge, Attempt("k")) == waits
    back = RefundState("r", "pay_1", Status.SUCCEEDED, 5, "", "r")
    assert bank.refund("pay_1", 5, "r", Attempt("k")) == back
    bank.report_usage(UsageReport("u", "m", "c", 1, START))
    assert bank.methods("acme") == []
    assert list(bank.records(Window(START, START + DAY))) == []
    refused: tuple[Any, ...] = (
        lambda: bank.setup_link("acme", "u"),
        lambda: bank.portal_link("acme", "u"),
        lambda: bank.bank_instructions("acme", Transfer("USD", "DE")),
        lambda: bank.event(b"", None),
    )
    for call in refused:
        with pytest.raises(Refused):
            call()
    for ask in (bank.payment, bank.refund_state, bank.dispute):
        with pytest.raises(Gone, match="Payments are posted by hand"):
            ask("x")
    with pytest.raises(Gone, match="Invoice inv_2 was not sent"):
        bank.invoice("inv_2")


def _onboard(lite: Deployment, **fields: Any) -> onboarding.Onboarded:
    with lite.database.transaction() as session:
        return onboarding.onboard(session, lite.clock, Customer("new", **fields), "operator:ann")


def test_a_new_customer_has_what_was_entered(lite: Deployment) -> None:
    details = BillingDetails("New Inc", "1 Road", "a@b.example", "136695976", "de", True)
    owner = Owner("own@new.example", "Ann", passwords.hash_password("a long password"))
    made = _onboard(
        lite, display_name="New", billing=details, owner=owner, project="p", key="first"
    )
    assert made.owner is not None and made.key is not None and made.remarks == ()
    assert (made.owner.email, made.owner.role, made.owner.name) == (
        "own@new.example",
        "owner",
        "Ann",
    )
    assert (made.project.name, made.project.tenant_id) == ("p", made.tenant.id)
    shown = made.describe()
    assert shown["key"] == {"id": made.key.id, "secret": made.key.secret}
    assert (shown["project_id"], shown["remarks"]) == (made.project.id, [])
    assert shown["owner"]["email"] == "own@new.example"
    with lite.database.read() as session:
        account = session.get_one(BillingAccount, made.tenant.id)
        kept = (account.legal_name, account.address, account.email, account.tax_id)
        assert kept == ("New Inc", "1 Road", "a@b.example", "DE136695976")
        assert (account.tax_region, account.tax_exempt) == ("DE", True)


def test_a_customer_without_details_and_one_without_a_price(lite: Deployment) -> None:
    bare = _onboard(lite, display_name="Bare", currency="EUR")
    assert (bare.owner, bare.key, bare.project.name) == (None, None, "default")
    assert bare.remarks == (
        "No price in EUR is in force: requests are refused until one is set, with "
        "`tollhouse price set --currency EUR`.",
    )
    assert not {"owner", "key"} & bare.describe().keys()
    with lite.database.read() as session:
        account = session.get_one(BillingAccount, bare.tenant.id)
        assert (account.legal_name, account.tax_region, account.tax_exempt) == ("Bare", "", False)


def test_what_is_wrong_with_a_new_customer_stores_nothing(lite: Deployment) -> None:
    with pytest.raises(BadRequest, match="longer than 120 characters") as told:
        _onboard(lite, key="k" * 121)
    assert told.value.param == "key"
    with pytest.raises(BadRequest, match="There is no time zone"):
        _onboard(lite, timezone="Mars/Base")
    assert _onboard(lite, key="k" * 120).key is not None
