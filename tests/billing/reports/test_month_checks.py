"""The checklist of a month's end, line by line: what is just inside the month and what is just after."""

from dataclasses import astuple
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.adjustments.tables import MoneyAct
from billing.audit.tables import AuditRun
from billing.ledger.ledger import AccountKind, Transaction, post, transfer
from billing.reports import month_end
from billing.reports.tables import SignedMonth
from billing.usage.tables import ParkedEvent, UsageBatch
from core.clock import FakeClock
from core.errors import BadRequest, Conflict
from core.money import Money, units_of
from core.tenants.models import AuditEntry
from tests.billing.payments.provider_rows import invoice_row

END = datetime(2026, 2, 1, tzinfo=UTC)
BEFORE = END - timedelta(microseconds=1)
NOW = datetime(2026, 2, 3, 12, 30, tzinfo=UTC)
GOOD = [
    ("The month is over", "good", "since 2026-02-01 00:00 UTC", ""),
    ("Usage is rated", "good", "0 events wait for rating", "/operator/health"),
    ("No usage is parked", "good", "0 events are parked", "/operator/parked"),
    ("Invoices are final", "good", "0 drafts of ended periods", "/operator/invoices?state=draft"),
    (
        "Acts on money are decided",
        "good",
        "0 wait for a second operator",
        "/operator/money-acts",
    ),
    ("Fees billed ahead are earned", "good", "0 shares are not posted", "/operator/ledger"),
    ("The audit is clean", "good", "2026-02-02 10:30 UTC", "/operator/reconciliation"),
    ("The trial balance", "good", "sums to zero", "/operator/ledger"),
    ("Overdue invoices", "good", "nothing is past due", "/operator/invoices"),
]


def _checks(session: Session, now: datetime = NOW) -> list[tuple[Any, ...]]:
    session.flush()
    return [astuple(each) for each in month_end.checklist(session, now, "2026-01")]


@pytest.fixture
def ready(session: Session) -> Session:
    session.add(AuditRun(at=NOW - timedelta(hours=26), clean=True, report={}))
    return session


def test_a_month_in_which_all_is_done(ready: Session) -> None:
    assert _checks(ready) == GOOD
    for now, state, summary in (
        (END, "good", "since 2026-02-01 00:00 UTC"),
        (BEFORE, "bad", "it ends on 2026-02-01 at 00:00 UTC"),
    ):
        assert _checks(ready, now)[0] == ("The month is over", state, summary, "")


def test_what_waits_since_the_month_and_what_came_after_it(ready: Session) -> None:
    for number, (at, rated) in enumerate(((BEFORE, None), (BEFORE, NOW), (END, None)), 1):
        batch = UsageBatch(id=number, recorded_at=at, events=5 * number, shard=0, rated_at=rated)
        ready.add(batch)
    for name, at, fields in (
        ("a", BEFORE, {}),
        ("b", BEFORE, {"released_at": NOW}),
        ("c", BEFORE, {"dismissed_by": "ann"}),
        ("d", END, {}),
    ):
        event = {"tenant_id": "acme", "code": "invalid", "reason": "", "payload": {}}
        ready.add(ParkedEvent(request_id=name, parked_at=at, **event, **fields))
    for number, status, ends in (
        (1, "draft", END),
        (2, "draft", END + timedelta(microseconds=1)),
        (3, "paid", END),
        (4, "draft", BEFORE),
    ):
        invoice_row(ready, number, sent=False, status=status, period_end=ends)
    for number, (status, at) in enumerate(
        (("waiting", BEFORE), ("posted", BEFORE), ("rejected", BEFORE), ("waiting", END))
    ):
        money = {"tenant_id": "acme", "target": "acme", "currency": "USD", "amount": 1}
        act = MoneyAct(
            id=f"act_{number}",
            kind="grant",
            reference=f"act {number}",
            status=status,
            requested_by="ann",
            requested_at=at,
            **money,
        )
        ready.add(act)
    found = _checks(ready)
    assert found[1] == ("Usage is rated", "bad", "5 events wait for rating", "/operator/health")
    assert found[2] == ("No usage is parked", "bad", "1 events are parked", "/operator/parked")
    assert found[3][1:3] == ("bad", "2 drafts of ended periods")
    assert found[4][1:3] == ("bad", "1 wait for a second operator")
    assert [found[place] for place in (0, 5, 6, 7)] == [GOOD[place] for place in (0, 5, 6, 7)]


@pytest.mark.parametrize(
    ("at", "clean", "state", "summary"),
    [
        (NOW - timedelta(hours=26, seconds=1), True, "bad", "2026-02-02 10:29 UTC; run it now"),
        (BEFORE, True, "bad", "the last one ran on 2026-01-31 23:59 UTC; run it now"),
        (NOW, False, "bad", "differences on 2026-02-03 12:30 UTC"),
        (NOW, True, "good", "2026-02-03 12:30 UTC"),
    ],
)
def test_the_last_audit_counts(
    ready: Session, at: datetime, clean: bool, state: str, summary: str
) -> None:
    ready.flush()
    ready.add(AuditRun(at=at, clean=clean, report={}))
    now = END if at == BEFORE else NOW
    (found,) = [each for each in _checks(ready, now) if each[0] == "The audit is clean"]
    assert found[1] == state and found[2].endswith(summary)


def test_an_audit_of_the_month_s_end_itself_is_late_enough(ready: Session) -> None:
    ready.flush()
    ready.add(AuditRun(at=END, clean=True, report={}))
    assert _checks(ready, END)[6][1:3] == ("good", "2026-02-01 00:00 UTC")


def test_what_is_past_due_is_a_warning_in_each_currency(ready: Session) -> None:
    for number, currency, due in (
        (1, "USD", NOW - timedelta(days=1)),
        (2, "EUR", NOW),
        (3, "USD", None),
    ):
        late = due or NOW + timedelta(days=1)
        invoice_row(
            ready, number, sent=False, currency=currency, due_at=late, final_at=END, due_minor=1234
        )
    found = _checks(ready, NOW + timedelta(hours=1))[8]
    assert found == (
        "Overdue invoices",
        "warn",
        "12.34 EUR, 12.34 USD past due",
        "/operator/invoices",
    )


def _owed(session: Session, name: str, at: datetime, dollars: str = "12") -> None:
    money = Money(units_of(dollars), "USD")
    entries = transfer(AccountKind.RECEIVABLE, AccountKind.REVENUE, money)
    post(session, Transaction("acme", "usage", name, at, entries))


def test_a_signature_keeps_the_checks_and_the_balances_of_the_month(ready: Session) -> None:
    _owed(ready, "in", BEFORE)
    _owed(ready, "after", END, "99")
    units = str(units_of("12"))
    kept = {"USD": {"receivable": units, "revenue": f"-{units}"}}
    assert month_end.balances(ready, "2026-01") == kept
    signed = month_end.sign(ready, FakeClock(NOW), "2026-01", "operator:ann", "n" * 2001)
    names = ("name", "state", "summary", "path")
    checks = [dict(zip(names, each, strict=True)) for each in GOOD]
    assert month_end.describe(ready, signed) == {
        "month": "2026-01",
        "signed_by": "operator:ann",
        "signed_at": "2026-02-03T12:30:00+00:00",
        "note": "n" * 2000,
        "checklist": checks,
        "balances": kept,
        "changed": False,
    }
    logged = ready.scalars(select(AuditEntry)).one()
    said = (logged.tenant_id, logged.at, logged.actor, logged.action, logged.target, logged.before)
    assert said == (None, NOW, "operator:ann", "month.sign", "2026-01", None)
    assert logged.after == {"note": "n" * 2000, "balances": kept}
    with pytest.raises(Conflict, match="operator:ann has signed 2026-01 already"):
        month_end.sign(ready, FakeClock(NOW), "2026-01", "operator:ann")
    _owed(ready, "late", BEFORE, "0.000000000001")
    assert month_end.changed(ready, signed)


def test_the_first_bad_check_is_named_and_a_warning_signs(ready: Session) -> None:
    invoice_row(ready, 1, sent=False, due_at=END, final_at=END)
    assert month_end.sign(ready, FakeClock(NOW), "2026-01", "operator:ann").note == ""
    ready.add(UsageBatch(recorded_at=BEFORE, events=1, shard=0))
    ready.add(AuditRun(at=NOW, clean=False, report={}))
    said = "2026-01 cannot be signed off: Usage is rated: 1 events wait for rating."
    with pytest.raises(Conflict, match=said):
        month_end.sign(ready, FakeClock(NOW), "2026-01", "operator:bob")


def test_signatures_are_listed_by_month_and_then_by_time(session: Session) -> None:
    for month, who, hour in (
        ("2026-01", "bob", 2),
        ("2026-01", "ann", 3),
        ("2026-02", "ann", 1),
        ("2025-12", "ann", 4),
    ):
        at = NOW + timedelta(hours=hour)
        row = {"note": "", "checklist": [], "balances": {}}
        session.add(SignedMonth(month=month, signed_by=who, signed_at=at, **row))
    session.flush()

    def _listed(month: str = "") -> list[tuple[str, str]]:
        return [(each.month, each.signed_by) for each in month_end.signatures(session, month)]

    january = [("2026-01", "bob"), ("2026-01", "ann")]
    assert _listed() == [("2026-02", "ann"), *january, ("2025-12", "ann")]
    assert _listed("2026-01") == january


def test_months_by_name() -> None:
    for now, month in (
        (datetime(2026, 1, 1, tzinfo=UTC), "2025-12"),
        (datetime(2026, 3, 31, 23, tzinfo=UTC), "2026-02"),
        (datetime(2026, 3, 1, tzinfo=UTC), "2026-02"),
    ):
        assert month_end.last_month(now) == month
    assert month_end.known_month("2026-02", END) == "2026-02"
    with pytest.raises(BadRequest, match="2026-02 has not begun") as told:
        month_end.known_month("2026-02", BEFORE)
    assert told.value.param == "month"
