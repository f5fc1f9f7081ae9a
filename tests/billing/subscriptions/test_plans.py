"""Plans, proration, commitments, taxes, credit notes, top-ups, and the printed page."""

import itertools
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from billing.accounts import accounts
from billing.accounts.tables import BillingAccount, BillingPeriod
from billing.invoicing import credit_notes, invoice_run, invoices, open_amounts
from billing.invoicing.printing import as_html, as_pdf
from billing.invoicing.tables import Invoice
from billing.invoicing.views import invoice_json
from billing.ledger import credits, ledger
from billing.ledger.ledger import AccountKind
from billing.payments import settlement, top_ups
from billing.payments.tables import Payment
from billing.periods import period_around
from billing.subscriptions import subscriptions
from billing.subscriptions.tables import Plan
from billing.taxes import tax_rates
from core.errors import BadRequest, Conflict
from core.money import Money, units_of, units_of_minor
from tests.billing.conftest import START, Deployment
from tests.billing.invoicing.test_invoices import clean

DAY = timedelta(days=1)


def plan(deployment: Deployment, name: str = "pro", **fields: Any) -> None:
    with deployment.database.transaction() as session:
        made = {"id": name, "name": name, "currency": "USD", "created_at": deployment.clock.now()}
        session.add(Plan(**{**made, **fields}))


def subscribe(deployment: Deployment, name: str, seats: int = 0) -> None:
    with deployment.database.transaction() as session:
        subscriptions.subscribe(session, "acme", name, deployment.clock.now(), seats)


def first_final(deployment: Deployment) -> dict[str, Any]:
    deployment.clock.advance(days=40)
    result = invoice_run.run(deployment.database, deployment.clock)
    assert not result.failed
    with deployment.database.read() as session:
        return invoice_json(session, invoices.get(session, result.finalised[0]))


def by_kind(document: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in document["lines"]:
        found[line["kind"]] = found.get(line["kind"], 0) + int(line["exact"]["units"])
    return found


def test_a_change_in_the_middle_of_a_month_is_prorated_to_the_second(
    deployment: Deployment,
) -> None:
    plan(deployment, "small", base_fee=units_of("31"))
    plan(deployment, "large", base_fee=units_of("62"), seat_fee=units_of("31"), included_seats=1)
    subscribe(deployment, "small")
    deployment.clock.advance(days=10)
    subscribe(deployment, "large", seats=3)
    document = first_final(deployment)
    assert by_kind(document) == {
        "base_fee": units_of("10") + units_of("42"),
        "seats": units_of("42"),
    }
    assert document["due"]["text"] == "94.00"
    clean(deployment)


@given(
    fee=st.integers(0, 10**15),
    cuts=st.lists(st.integers(1, 2_678_399), max_size=6, unique=True),
)
def test_parts_of_a_fee_sum_to_the_fee(fee: int, cuts: list[int]) -> None:
    whole = 2_678_400_000_000
    marks = [0, *sorted(cut * 1_000_000 for cut in cuts), whole]
    parts = [
        subscriptions.Segment(Plan(), 0, START, START, begin, end, whole)
        for begin, end in itertools.pairwise(marks)
    ]
    assert sum(part.share(fee) for part in parts) == fee


def test_included_usage_and_a_commitment_are_trued_up(lite: Deployment) -> None:
    plan(lite, included_usage=units_of("2"), minimum_commitment=units_of("10"))
    subscribe(lite, "pro")
    lite.record(lite.event(input_tokens=0, cached_tokens=0, output_tokens=10_000_000))  # 6.00
    assert by_kind(first_final(lite)) == {
        "usage": units_of("6"),
        "included": -units_of("2"),
        "commitment": units_of("6"),
    }
    clean(lite)


def test_taxes_are_rounded_once_and_exemption_is_kept(lite: Deployment) -> None:
    with lite.database.transaction() as session:
        lite_account = session.get_one(BillingAccount, "acme")
        lite_account.tax_region = "DE"
        tax_rates.add_rate(session, "DE", "VAT", 160_000, START - 400 * DAY)
        tax_rates.add_rate(session, "DE", "VAT", 190_000, START)
    lite.record(lite.event(input_tokens=0, cached_tokens=0, output_tokens=12_345_678))  # 7.41
    document = first_final(lite)
    assert (document["subtotal"]["minor"], document["tax"]["minor"]) == (741, 141)
    with lite.database.read() as session:
        assert ledger.balance(session, "acme", AccountKind.TAX, "USD") == -units_of("1.41")
    with lite.database.transaction() as session:
        session.get_one(BillingAccount, "acme").tax_exempt = True
    lite.record(lite.event(output_tokens=1_000_000))
    lite.clock.advance(days=32)
    (second,) = invoice_run.run(lite.database, lite.clock).finalised
    with lite.database.read() as session:
        assert invoices.get(session, second).tax_minor == 0
    clean(lite)


def test_credit_notes_take_back_all_of_an_invoice_and_its_tax_but_no_more(
    deployment: Deployment,
) -> None:
    with deployment.database.transaction() as session:
        session.get_one(BillingAccount, "acme").tax_region = "DE"
        tax_rates.add_rate(session, "DE", "VAT", 190_000, START)
    deployment.record(
        deployment.event(input_tokens=0, cached_tokens=0, output_tokens=16_666_667)
    )  # 10.00
    document = first_final(deployment)
    now = deployment.clock.now()

    def _note(minor: int, reference: str, **more: bool) -> str:
        with deployment.database.transaction() as session:
            note = credit_notes.issue(
                session,
                invoice_id=document["id"],
                net_minor=minor,
                reason="slow answers",
                reference=reference,
                at=now,
                **more,
            )
            return note.outcome

    assert _note(333, "n1") == _note(333, "n1") == "due"
    with deployment.database.transaction() as session:
        invoice = session.get_one(Invoice, document["id"])
        assert (invoice.credited_minor, open_amounts.open_minor(invoice)) == (396, 794)
        payment = settlement.begin_payment(
            session,
            tenant_id="acme",
            invoice_id=invoice.id,
            amount_minor=794,
            currency="USD",
            provider="manual",
            reference="w",
            at=now,
        )
        settlement.succeed(session, payment, now)
    assert _note(300, "n2") == "balance"
    with deployment.database.read() as session:
        assert settlement.wallet(session, "acme", "USD") == units_of("3.57")
    assert _note(367, "n3", refund=True) == "refund"
    with deployment.database.transaction() as session:
        invoice = session.get_one(Invoice, document["id"])
        assert open_amounts.open_minor(invoice) == -437
        paid = session.get_one(Payment, payment.id)
        settlement.refund(session, paid, 437, "r", now)
        assert open_amounts.open_minor(invoice) == 0
        assert ledger.balance(session, "acme", AccountKind.RECEIVABLE, "USD") == 0
        assert ledger.balance(session, "acme", AccountKind.TAX, "USD") == 0
    with pytest.raises(Conflict, match="has 0 minor units net left"):
        _note(1, "n4")
    clean(deployment)


def test_a_wallet_is_topped_up_once_and_a_dead_card_is_not_tried_again(lite: Deployment) -> None:
    now = lite.clock.now()
    with lite.database.transaction() as session:
        top_ups.configure(session, "acme", Money(units_of("5")), Money(units_of("20")))
        (payment,) = top_ups.due(session, "fake", now)
        assert top_ups.due(session, "fake", now + DAY) == []
        settlement.succeed(session, payment, now)
        assert settlement.wallet(session, "acme", "USD") == units_of("20")
        assert top_ups.due(session, "fake", now + DAY) == []
    lite.record(lite.event(output_tokens=30_000_000))
    lite.rate()
    with lite.database.transaction() as session:
        (again,) = top_ups.due(session, "fake", now + 2 * DAY)
        settlement.fail(session, again, "card_declined", now)
        assert top_ups.due(session, "fake", now + 3 * DAY) == []
        with pytest.raises(BadRequest):
            top_ups.configure(session, "acme", Money(1), Money(units_of("0.001")))
    clean(lite)


@pytest.mark.parametrize(
    ("anchor", "zone", "at", "start", "end"),
    [
        (31, "UTC", "2026-02-10", "2026-01-31T00:00", "2026-02-28T00:00"),
        (31, "UTC", "2028-02-29T12:00", "2028-02-29T00:00", "2028-03-31T00:00"),
        (30, "UTC", "2028-02-28T23:59", "2028-01-30T00:00", "2028-02-29T00:00"),
        (1, "America/New_York", "2026-03-15", "2026-03-01T05:00", "2026-04-01T04:00"),
        (15, "Asia/Kathmandu", "2026-05-15", "2026-05-14T18:15", "2026-06-14T18:15"),
    ],
)
def test_anchors_zones_leap_days_and_clock_changes(
    anchor: int, zone: str, at: str, start: str, end: str
) -> None:
    moment = datetime.fromisoformat(at).replace(tzinfo=UTC)
    found = period_around(moment, anchor, zone)
    assert [f"{each:%Y-%m-%dT%H:%M}" for each in found] == [start, end]


@given(
    days=st.integers(0, 2555),
    seconds=st.integers(0, 86_399),
    anchor=st.integers(1, 31),
    zone=st.sampled_from(["UTC", "Europe/Berlin", "America/Sao_Paulo", "Asia/Kathmandu"]),
)
def test_periods_follow_each_other_without_a_gap(
    days: int, seconds: int, anchor: int, zone: str
) -> None:
    moment = datetime(2024, 1, 1, tzinfo=UTC) + timedelta(days=days, seconds=seconds)
    start, end = period_around(moment, anchor, zone)
    assert start <= moment < end
    assert period_around(end, anchor, zone)[0] == end
    assert period_around(start - timedelta(microseconds=1), anchor, zone)[1] == start


def test_a_moved_anchor_makes_one_short_period_and_no_gap(lite: Deployment) -> None:
    lite.record(lite.event())
    lite.rate()
    with lite.database.transaction() as session:
        account = accounts.lock_account(session, "acme")
        accounts.set_anchor(session, account, 15, lite.clock.now())
    for _ in range(5):
        lite.clock.advance(days=14)
        lite.record(lite.event())
    lite.rate()
    with lite.database.read() as session:
        found = list(session.scalars(select(BillingPeriod).order_by(BillingPeriod.starts_at)))
    assert [f"{each.starts_at:%m-%d}" for each in found] == ["01-01", "02-01", "02-15"]
    for before, after in itertools.pairwise(found):
        assert before.ends_at == after.starts_at


@pytest.mark.parametrize(("day", "refused"), [(0, True), (1, False), (31, False), (32, True)])
def test_an_anchor_is_a_day_of_a_month(lite: Deployment, day: int, refused: bool) -> None:
    with lite.database.transaction() as session:
        account = accounts.lock_account(session, "acme")
        with pytest.raises(BadRequest, match="1 to 31") if refused else nullcontext():
            accounts.set_anchor(session, account, day, lite.clock.now())


def test_a_plan_or_credit_in_another_currency_is_refused(lite: Deployment) -> None:
    plan(lite, "euro", currency="EUR")
    with pytest.raises(BadRequest, match="in EUR, the account in USD"):
        subscribe(lite, "euro")
    with pytest.raises(BadRequest, match="in USD"), lite.database.transaction() as session:
        credits.grant(
            session,
            tenant_id="acme",
            kind="promo",
            money=Money(1, "EUR"),
            reference="x",
            at=lite.clock.now(),
        )


def test_the_printed_page_says_what_the_data_says(lite: Deployment) -> None:
    plan(lite, base_fee=units_of("31"))
    subscribe(lite, "pro")
    lite.record(lite.event(output_tokens=1_000_000, project_id="<b>bold</b>"))
    document = first_final(lite)
    page = as_html(document)
    assert document["number"] in page and document["open"]["text"] in page
    assert "<b>bold</b>" not in page and "&lt;b&gt;bold" in page
    for line in document["lines"]:
        assert line["billed"]["text"] in page
    assert int(document["open"]["minor"]) * 10**10 == units_of_minor(
        document["due"]["minor"], "USD"
    )
    pdf = as_pdf(page)
    assert pdf.startswith(b"%PDF-") and len(pdf) > 2000
