"""Deferred revenue, the trial balance and the month's journal; every amount is worked out by hand."""

import csv
import io
from datetime import UTC, datetime

import pytest

from billing.invoicing import invoice_run, invoices, recognition
from billing.ledger import journal, ledger
from billing.ledger.journal import Shape
from billing.ledger.ledger import AccountKind
from billing.payments import settlement
from billing.subscriptions import subscriptions
from core.errors import BadRequest
from core.money import units_of
from tests.billing.conftest import Deployment
from tests.billing.invoicing.test_invoices import clean
from tests.billing.subscriptions.test_plans import plan, subscribe


def at(deployment: Deployment, month: int, day: int, year: int = 2026) -> None:
    """Invoices and recognition run on this day."""
    deployment.clock.set(datetime(year, month, day, tzinfo=UTC))
    assert not invoice_run.run(deployment.database, deployment.clock).failed
    with deployment.database.transaction() as session:
        recognition.recognise(session, deployment.clock.now())
    clean(deployment)


def balances(deployment: Deployment) -> tuple[str, str]:
    """What is deferred and what is earned."""
    with deployment.database.read() as session:
        deferred, revenue = (
            -ledger.balance(session, "acme", kind, "USD") / units_of("1")
            for kind in (AccountKind.DEFERRED, AccountKind.REVENUE)
        )
    return f"{deferred:.2f}", f"{revenue:.2f}"


def yearly(deployment: Deployment) -> None:
    plan(deployment, "year", base_fee=units_of("365"), interval="year", in_advance=True)
    subscribe(deployment, "year")


def test_a_year_is_earned_by_the_month(deployment: Deployment) -> None:
    yearly(deployment)
    at(deployment, 2, 3)
    assert balances(deployment) == ("334.00", "31.00")
    at(deployment, 2, 28)
    assert balances(deployment) == ("334.00", "31.00")
    at(deployment, 3, 1)
    assert balances(deployment) == ("306.00", "59.00")
    at(deployment, 1, 1, 2027)
    assert balances(deployment) == ("0.00", "365.00")
    with deployment.database.read() as session:
        earned = recognition.schedule(session)
    assert [each["units"] for each in earned[:3]] == [units_of(n) for n in ("31", "28", "31")]
    assert len(earned) == 12


def test_a_cancelled_year_earns_what_was_delivered(deployment: Deployment) -> None:
    yearly(deployment)
    at(deployment, 3, 2)
    with deployment.database.transaction() as session:
        subscriptions.cancel(session, "acme", deployment.clock.now())
    at(deployment, 4, 3)  # 60 days were delivered: 31, 28 and one of March
    assert balances(deployment) == ("0.00", "60.00")
    with deployment.database.read() as session:
        earned = {str(each["month"]): each["units"] for each in recognition.schedule(session)}
    assert earned == {
        "2026-01": units_of("31"),
        "2026-02": units_of("28"),
        "2026-03": units_of("1"),
    }
    at(deployment, 1, 2, 2027)
    assert balances(deployment) == ("0.00", "60.00")


def test_a_void_invoice_releases_all_that_is_deferred(deployment: Deployment) -> None:
    yearly(deployment)
    at(deployment, 2, 3)
    with deployment.database.transaction() as session:
        invoice = invoices.get(session, "TH-000001")
        settlement.void(session, invoice.id, deployment.clock.now(), "wrong customer")
    at(deployment, 2, 4)
    assert balances(deployment) == ("0.00", "0.00")


def test_the_trial_balance_sums_to_zero_and_reaches_back(deployment: Deployment) -> None:
    yearly(deployment)
    at(deployment, 2, 3)
    with deployment.database.read() as session:
        rows = {row["account"]: row["balance"]["amount"] for row in journal.trial_balance(session)}
        before = journal.trial_balance(session, datetime(2026, 2, 3, tzinfo=UTC))
        found = journal.transactions(session, limit=1, search="RECOGN")
        missing = journal.transactions(session, limit=9, search="100%")
    assert rows == {"receivable": "365", "revenue": "-31", "deferred": "-334"}
    assert before == []
    assert [each["kind"] for each in found] == ["recognition"]
    assert found[0]["memo"].endswith(", 2026-01")
    assert {e["account"]: e["amount"]["amount"] for e in found[0]["entries"]} == {
        "deferred": "31",
        "revenue": "-31",
    }
    assert missing == []


def test_a_journal_sums_to_zero_in_each_shape(deployment: Deployment) -> None:
    yearly(deployment)
    deployment.record(deployment.event(output_tokens=12_345_678))  # 7.4074215 dollars and a bit
    at(deployment, 2, 3)
    with deployment.database.read() as session:
        texts = {shape: journal.journal(session, "2026-02", shape) for shape in Shape}
        renamed = journal.journal(session, "2026-02", Shape.PLAIN, {"revenue": "R-1"})
        empty = journal.journal(session, "2025-12")
        with pytest.raises(BadRequest, match="is not a month"):
            journal.journal(session, "2026-13")
        with pytest.raises(BadRequest, match="no account 'sales'"):
            journal.journal(session, "2026-02", Shape.PLAIN, {"sales": "1"})
    # 80 input tokens at 0.15, 20 at 0.075 and the output at 0.60 a million: 7.4074203 dollars.
    assert texts[Shape.PLAIN].splitlines() == [
        "date,account,code,currency,debit,credit,memo",
        '2026-02-28,receivable,1100,USD,372.41,,"receivable, 2026-02"',
        '2026-02-28,deferred,2150,USD,,334.00,"deferred, 2026-02"',
        '2026-02-28,revenue,4000,USD,,38.41,"revenue, 2026-02"',
    ]
    assert ",R-1,USD,,38.41," in renamed and ",4000," not in renamed
    assert len(empty.splitlines()) == 1
    xero = list(csv.DictReader(io.StringIO(texts[Shape.XERO])))
    assert [row["*Amount"] for row in xero] == ["372.41", "-334.00", "-38.41"]
    assert {row["*Date"] for row in xero} == {"28/02/2026"}
    for shape, debit, credit in (
        (Shape.NETSUITE, "Debit", "Credit"),
        (Shape.QUICKBOOKS, "Debits", "Credits"),
    ):
        rows = list(csv.DictReader(io.StringIO(texts[shape])))
        assert [(row[debit], row[credit]) for row in rows] == [
            ("372.41", ""),
            ("", "334.00"),
            ("", "38.41"),
        ]


def test_a_month_that_is_billed_when_it_ends_defers_nothing(deployment: Deployment) -> None:
    plan(deployment, "month", base_fee=units_of("31"))
    subscribe(deployment, "month")
    at(deployment, 2, 3)
    assert balances(deployment) == ("0.00", "31.00")
    with deployment.database.read() as session:
        assert recognition.schedule(session) == []
        kinds = {each["kind"] for each in journal.transactions(session, limit=100)}
    assert not kinds & {"deferral", "recognition"}
