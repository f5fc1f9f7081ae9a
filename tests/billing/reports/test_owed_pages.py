"""What all tenants owe, page by page and by age; organisations above organisations; the seller."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.accounts import ensure_account
from billing.accounts.tables import BillingAccount
from billing.adjustments import organisation_links
from billing.adjustments.organisation_links import LinkDraft
from billing.invoicing.tables import ChildInvoice, Invoice
from billing.organisations import organisation_usage, organisations
from billing.organisations.tables import OrganisationLink
from billing.payments.tables import Payment
from billing.reports import receivables
from billing.usage.tables import DailyTenantUsage
from core.clock import FakeClock
from core.errors import BadRequest, Conflict, Forbidden, NotFound
from core.tenants.models import Tenant
from core.tenants.scope import scope_of_key, scope_of_operator
from tests.billing.conftest import START
from tests.billing.payments.provider_rows import invoice_row, payment_row

DAY = timedelta(days=1)
NOW = START + 100 * DAY
MOMENT = timedelta(microseconds=1)
BUCKETS = ("not due", "1-30 days", "31-60 days", "61-90 days", "over 90 days")


@pytest.fixture
def books(session: Session) -> Session:
    for name in ("birch", "cedar"):
        tenant = Tenant(id=name, name=name, display_name=f"{name.title()} 100%", created_at=START)
        session.add(tenant)
        session.flush()
        ensure_account(session, name, START)
    return session


def _ages(session: Session) -> None:
    for number, due in enumerate(
        (
            None,
            NOW,
            NOW - MOMENT,
            NOW - 30 * DAY,
            NOW - 30 * DAY - MOMENT,
            NOW - 60 * DAY,
            NOW - 60 * DAY - MOMENT,
            NOW - 90 * DAY,
            NOW - 90 * DAY - MOMENT,
        )
    ):
        invoice_row(session, number + 1, sent=False, due_at=due, due_minor=10**number)


def test_open_amounts_by_age_on_both_sides_of_each_bound(session: Session) -> None:
    _ages(session)
    parts = {"paid_minor": 30, "credited_minor": 20}
    invoice_row(session, 20, sent=False, currency="EUR", due_at=NOW, due_minor=100, **parts)
    invoice_row(session, 21, sent=False, currency="EUR", due_at=NOW, due_minor=50, **parts)
    invoice_row(session, 22, sent=False, currency="JPY", due_at=NOW, due_minor=40, **parts)
    for number, status in ((23, "draft"), (24, "paid"), (25, "void"), (26, "uncollectible")):
        invoice_row(session, number, sent=False, status=status, due_at=NOW)
    assert receivables.ageing(session, NOW) == [
        {"currency": "EUR"} | dict(zip(BUCKETS, (50, 0, 0, 0, 0), strict=True)) | {"total": 50},
        {"currency": "USD"}
        | dict(zip(BUCKETS, (11, 1100, 110_000, 11_000_000, 100_000_000), strict=True))
        | {"total": 111_111_111},
    ]
    for bucket, numbers in zip(BUCKETS, ((1, 2), (3, 4), (5, 6), (7, 8), (9,)), strict=True):
        found = receivables.invoices(session, NOW, bucket=bucket)
        dollars = {each.number for each, _ in found if each.currency == "USD"}
        assert dollars == set(numbers), bucket


class Doubling:
    """A yen is two picodollars' worth: so that what is converted shows."""

    currency = "USD"

    def __init__(self) -> None:
        self.days: list[date] = []

    def convert(self, units: int, currency: str, day: date) -> int:
        self.days.append(day)
        return units if currency == "USD" else 2 * units


def test_sums_in_one_currency_are_converted_by_the_day(session: Session) -> None:
    at = datetime(2026, 1, 20, 23, 59, tzinfo=UTC)
    for number, currency, minor, final in (
        (1, "USD", 100, at),
        (2, "EUR", 30, at + timedelta(minutes=1)),
        (3, "EUR", 5, None),
    ):
        invoice_row(
            session,
            number,
            sent=False,
            currency=currency,
            due_at=NOW - DAY,
            final_at=final,
            due_minor=minor,
            total_minor=minor,
            status="final" if final else "draft",
        )
    converter: Any = Doubling()
    assert receivables.billed(session, NOW, converter) == 170
    assert sorted(set(converter.days)) == [date(2026, 1, 20), date(2026, 1, 21), NOW.date()]
    assert receivables.billed(session, NOW, converter, state="draft") == 10
    assert receivables.billed(session, NOW, converter, search="TH-02") == 60
    assert receivables.billed(session, NOW, converter, bucket="not due") == 0
    (line,) = receivables.ageing(session, NOW, converter)
    assert line == {"currency": "USD", "total": 160} | dict(
        zip(BUCKETS, (0, 160, 0, 0, 0), strict=True)
    )
    assert receivables.first_day(session, NOW) == date(2026, 1, 20)


def test_drafts_of_ended_periods_wait(session: Session) -> None:
    assert receivables.first_day(session, NOW) == NOW.date()
    for number, status, end in ((1, "draft", NOW), (2, "draft", NOW + MOMENT), (3, "final", NOW)):
        invoice_row(session, number, sent=False, status=status, period_end=end)
    assert receivables.drafts(session, NOW) == 1


def test_pages_of_invoices_and_what_is_searched(books: Session) -> None:
    for number, tenant in ((1, "acme"), (2, "birch"), (3, "birch"), (4, "gone")):
        status = "paid" if number == 3 else "final"
        invoice_row(books, number, sent=False, tenant_id=tenant, status=status)

    def _ids(**asked: Any) -> list[str]:
        return [each.id[-2:] for each, _ in receivables.invoices(books, NOW, **asked)]

    assert _ids() == ["04", "03", "02", "01"]
    assert _ids(limit=3) == ["04", "03", "02"] and _ids(before="inv_02") == ["01"]
    assert _ids(before="inv_nothing") == ["04", "03", "02", "01"]
    assert _ids(state="paid") == ["03"] and _ids(state="paid", search="acme") == []
    for search, ids in (
        ("bIRCH", ["03", "02"]),
        ("100%", ["03", "02"]),
        ("TH-04", ["04"]),
        ("inv_01", ["01"]),
        ("%", ["03", "02"]),
        ("none", []),
    ):
        assert _ids(search=search) == ids, search
    names = [name for _, name in receivables.invoices(books, NOW)]
    assert names == ["gone", "birch", "birch", "acme"]


def test_pages_of_payments_and_what_is_searched(books: Session) -> None:
    invoice_row(books, 7, sent=False)
    for name, fields in (("a", {"invoice_id": "inv_07"}), ("b", {}), ("c", {"status": "failed"})):
        payment_row(books, name, **fields)
    books.get_one(Payment, "pay_b").tenant_id = "gone"
    books.get_one(Payment, "pay_a").created_at = START + DAY
    books.flush()

    def _found(**asked: Any) -> list[tuple[str, str, str | None]]:
        rows = receivables.payments(books, **asked)
        return [(each.id, tenant, label) for each, tenant, label in rows]

    a, b, c = ("pay_a", "acme", "TH-07"), ("pay_b", "gone", None), ("pay_c", "acme", None)
    assert _found() == [a, c, b]
    assert (
        _found(limit=2) == [a, c]
        and _found(before="pay_c") == [b]
        and _found(before="x") == [a, c, b]
    )
    assert _found(state="failed") == [c] and _found(state="failed", search="pi_a") == []
    for search, found in (
        ("th-07", [a]),
        ("pi_b", [b]),
        ("pay_c", [c]),
        ("ACME", [a, c]),
        ("x", []),
    ):
        assert _found(search=search) == found, search


def _link(session: Session, child: str, parent: str, **fields: Any) -> OrganisationLink:
    clock = FakeClock(fields.pop("at", START))
    return organisation_links.set_parent(session, clock, LinkDraft(child, parent, **fields))


def test_a_link_keeps_its_start_until_its_parent_changes(books: Session) -> None:
    made = _link(books, "birch", "acme", pays="parent", markup_percent="12.5", changed_by="ann")
    assert organisations.describe(books, made) == {
        "tenant": "birch",
        "parent": "acme",
        "pays": "parent",
        "markup_percent": "12.5",
        "since": "2026-01-01T00:00:00+00:00",
    }
    assert (made.markup_ppm, made.changed_by) == (125_000, "ann")
    _link(books, "birch", "acme", at=START + DAY)
    assert (made.since, made.pays, made.markup_ppm, made.changed_by) == (START, "self", 0, "")
    _link(books, "birch", "cedar", at=START + DAY)
    assert (made.since, made.parent_id) == (START + DAY, "cedar")
    _link(books, "acme", "cedar", at=START + 2 * DAY)
    assert organisations.parents_since(books, ["cedar", "birch"]) == {"cedar": START + DAY}
    assert organisations.by_depth(books, ["cedar", "acme", "birch"]) == [
        ["acme", "birch"],
        ["cedar"],
    ]
    gone = organisation_links.remove_parent(books, "birch")
    assert gone.tenant_id == "birch" and set(organisations.all_links(books)) == {"acme"}
    with pytest.raises(NotFound, match="The tenant has no parent"):
        organisation_links.remove_parent(books, "birch")


def test_a_change_of_parent_forgets_what_drafts_passed_on(books: Session) -> None:
    """Not what final invoices did, nor another child's."""

    def _passed() -> set[str]:
        return set(books.scalars(select(ChildInvoice.invoice_id)))

    def _pass_on(number: int, child: str) -> None:
        sums = {"charged_minor": 1, "markup_minor": 0, "pays": "parent", "parent_id": "acme"}
        span = {"period_start": START, "period_end": NOW}
        name = f"inv_{number:02}"
        books.add(ChildInvoice(invoice_id=name, child_id=child, **sums, **span))
        books.flush()

    for number, child, status in (
        (1, "birch", "draft"),
        (2, "cedar", "draft"),
        (3, "birch", "final"),
    ):
        invoice_row(books, number, sent=False, tenant_id=child, status=status)
        if status == "draft":
            books.get_one(Invoice, f"inv_{number:02}").number = None
        _pass_on(number, child)
    _link(books, "birch", "acme")
    assert _passed() == {"inv_02", "inv_03"}
    _pass_on(1, "birch")
    organisation_links.remove_parent(books, "birch")
    assert _passed() == {"inv_02", "inv_03"}


@pytest.mark.parametrize("written", ["-0.0001", "1000.0001", "0.00001", "x", "NaN", "Infinity", ""])
def test_a_markup_is_a_percentage_of_four_places(books: Session, written: str) -> None:
    with pytest.raises(BadRequest, match="is not a percentage") as told:
        _link(books, "birch", "acme", markup_percent=written)
    assert told.value.param == "markup_percent"


@pytest.mark.parametrize(("written", "ppm"), [("0", 0), ("0.0001", 1), ("1000", 10_000_000)])
def test_the_least_and_the_greatest_markup(books: Session, written: str, ppm: int) -> None:
    made = _link(books, "birch", "acme", markup_percent=written)
    assert (made.markup_ppm, organisations.percent(ppm)) == (ppm, written)


def test_what_is_wrong_with_a_link(books: Session) -> None:
    with pytest.raises(BadRequest, match=f"pays is '{'x' * 20}'") as wrong:
        _link(books, "birch", "acme", pays="x" * 30)
    assert wrong.value.param == "pays"
    for child, parent in (("acme", "acme"), ("acme", "cedar")):
        if parent == "cedar":
            _link(books, "birch", "acme")
            _link(books, "cedar", "birch")
        with pytest.raises(Conflict, match="cannot be below itself") as told:
            _link(books, child, parent)
        assert told.value.param == "parent"
    organisation_links.remove_parent(books, "birch")
    account = books.get_one(BillingAccount, "birch")
    account.currency = "EUR"
    for fields in ({"pays": "parent"}, {"markup_percent": "1"}):
        with pytest.raises(Conflict, match="The child is billed in EUR, the parent in USD") as told:
            _link(books, "birch", "acme", **fields)
        assert told.value.param == "pays"
    _link(books, "birch", "acme")
    account.currency = "USD"
    for name in ("birch", "acme"):
        changed = books.get_one(BillingAccount, name)
        changed.collection = "stripe_meters"
        for fields in ({"pays": "parent"}, {"markup_percent": "1"}):
            with pytest.raises(Conflict, match="cannot be passed on"):
                _link(books, "birch", "acme", **fields)
        _link(books, "birch", "acme")
        changed.collection = "stripe"
    assert _link(books, "birch", "acme", pays="parent").pays == "parent"


def test_there_are_eight_levels_at_most(session: Session) -> None:
    for number in range(10):
        name = f"t{number}"
        session.add(Tenant(id=name, name=name, display_name=name, created_at=START))
    session.flush()
    for number in range(1, 8):
        _link(session, f"t{number}", f"t{number - 1}")
    with pytest.raises(Conflict, match="more than 8 levels") as told:
        _link(session, "t8", "t7")
    assert told.value.param == "parent"
    _link(session, "t8", "t6")
    with pytest.raises(Conflict, match="more than 8 levels"):
        _link(session, "t0", "t9")
    paths = organisations.paths_below(organisations.all_links(session), "t5")
    assert [(name, len(path)) for name, path in paths.items()] == [("t6", 1), ("t7", 2), ("t8", 2)]


def _used(session: Session, tenant: str, at: datetime, amount: int, **fields: Any) -> None:
    row: dict[str, Any] = dict.fromkeys(
        ("requests", "input_tokens", "cached_tokens", "output_tokens"), 1
    )
    row |= {"tenant_id": tenant, "at": at, "model": "demo", "currency": "USD", "amount": amount}
    session.add(DailyTenantUsage(**row | fields))
    session.flush()


def test_the_usage_below_counts_from_the_day_of_each_link(books: Session) -> None:
    _link(books, "birch", "acme", markup_percent="10", at=START + 2 * DAY + timedelta(hours=7))
    _link(books, "cedar", "birch", pays="parent", markup_percent="50", at=START)
    for day in range(5):
        _used(books, "acme", START + day * DAY, 100)
        _used(books, "birch", START + day * DAY, 15)
        _used(books, "cedar", START + day * DAY, 1, model="other", currency="EUR")
    scope = scope_of_operator("acme")
    rows = organisation_usage.read(books, scope, START + DAY, START + 4 * DAY)
    shown = [
        (r["tenant"], r["level"], r["parent"], r["pays"], r["markup_percent"], r["currency"])
        for r in rows
    ]
    assert shown == [
        ("acme", 0, "", "", "", "USD"),
        ("birch", 1, "acme", "self", "10", "USD"),
        ("cedar", 2, "birch", "parent", "50", "EUR"),
    ]
    assert [(r["requests"], r["amount"], r["markup"], r["model"]) for r in rows] == [
        (3, 300, 0, ""),
        (2, 30, 3, ""),
        (2, 2, 1, ""),
    ]
    by_model = organisation_usage.rollup(books, "acme", START, START + 5 * DAY, by_model=True)
    assert [(r["tenant_id"], r["model"], r["amount"]) for r in by_model] == [
        ("acme", "demo", 500),
        ("birch", "demo", 45),
        ("cedar", "other", 3),
    ]
    below = organisation_usage.rollup(books, "birch", START, START + DAY)
    assert [(r["model"], r["amount"]) for r in below] == [("", 15), ("", 1)]
    nothing = organisation_usage.rollup(books, "acme", START + 9 * DAY, START + 10 * DAY)
    assert [(r["tenant"], r["currency"], r["requests"], r["markup"]) for r in nothing] == [
        ("birch", "", 0, 0),
        ("cedar", "", 0, 0),
    ]
    (json,) = organisation_usage.rollup_json([rows[1]])
    assert [json[name]["units"] for name in ("amount", "markup", "with_markup")] == [
        "30",
        "3",
        "33",
    ]
    with pytest.raises(Forbidden, match="Access to one project"):
        organisation_usage.read(books, scope_of_key("acme", "proj", "key", "member"), START, NOW)
