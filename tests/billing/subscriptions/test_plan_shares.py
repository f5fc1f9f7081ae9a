"""What a plan includes and commits to, by hand: shares of periods and of years, and their shortfalls."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount, BillingPeriod
from billing.exports.subjects import SUBJECTS, Period, wanted_of
from billing.invoicing import plan_lines
from billing.invoicing.invoice_inputs import InvoiceInputs
from billing.invoicing.invoice_lines import Line
from billing.invoicing.tables import Invoice, InvoiceLine
from billing.ledger.ledger import AccountKind, Transaction, post, transfer
from billing.subscriptions.tables import Plan, Subscription
from core.money import Money
from core.tenants.scope import scope_of_key, scope_of_operator
from tests.billing.conftest import START, Deployment
from tests.billing.payments.provider_rows import invoice_row

CENT, DAY, MOMENT = 10**10, timedelta(days=1), timedelta(microseconds=1)
FEB = datetime(2026, 2, 1, tzinfo=UTC)
JANUARY = BillingPeriod(id="per", tenant_id="acme", starts_at=START, ends_at=FEB)
ACCOUNT = BillingAccount(tenant_id="acme", currency="USD", timezone="UTC")


def _plan(**fields: Any) -> Plan:
    amounts = {"included_usage": 0, "minimum_commitment": 0, "base_fee": 0, "seat_fee": 0}
    return Plan(**{"name": "p", "interval": "month", "currency": "USD", **amounts, **fields})


def _held(plan: Plan, starts: datetime = START, **fields: Any) -> tuple[Subscription, Plan]:
    return Subscription(id=1, seats=0, starts_at=starts, overrides={}, **fields), plan


def _shown(lines: list[Line]) -> list[tuple[Any, ...]]:
    return [
        (each.kind, each.description, each.exact, each.minor, each.starts_at, each.ends_at)
        for each in lines
    ]


@pytest.mark.parametrize(
    ("spent", "covered"),
    [(0, 0), (-5, 0), (30, 30), (31 * CENT, 31 * CENT), (32 * CENT, 31 * CENT)],
)
def test_included_usage_covers_what_was_spent(spent: int, covered: int) -> None:
    held = [_held(_plan(included_usage=31 * CENT))]
    lines = plan_lines._included(held, JANUARY, spent, "USD")
    text = "Usage included in the plan"
    minor = -(covered // CENT)
    expected = [("included", text, -covered, minor, START, FEB)] if covered else []
    assert _shown(lines) == expected


def test_included_usage_of_a_part_of_the_period() -> None:
    plan = _plan(included_usage=31 * CENT)
    held = [_held(plan, START + 10 * DAY, ends_at=START + 12 * DAY)]
    (line,) = plan_lines._included(held, JANUARY, 99 * CENT, "USD")
    assert line.exact == -2 * CENT
    trial = [_held(plan, billed_from=FEB)]
    (line,) = plan_lines._included(trial, JANUARY, 99 * CENT, "USD")
    assert line.exact == -31 * CENT, "a trial includes it too"


@pytest.mark.parametrize(("spent", "owed"), [(31, 0), (32, 0), (30, 1), (0, 31), (-1, 32)])
def test_a_commitment_of_a_month_is_owed_where_less_was_spent(spent: int, owed: int) -> None:
    held = [_held(_plan(minimum_commitment=31 * CENT))]
    lines = plan_lines._commitment(held, JANUARY, spent * CENT, "USD")
    text = "Minimum commitment, shortfall"
    expected = [("commitment", text, owed * CENT, owed, START, FEB)] if owed else []
    assert _shown(lines) == expected


def test_a_trial_and_a_yearly_plan_commit_to_nothing_by_the_month() -> None:
    plan = _plan(minimum_commitment=31 * CENT)
    (line,) = plan_lines._commitment([_held(plan, billed_from=START + 30 * DAY)], JANUARY, 0, "USD")
    assert line.exact == CENT
    yearly = [_held(_plan(minimum_commitment=31 * CENT, interval="year"))]
    assert plan_lines._commitment(yearly, JANUARY, 0, "USD") == []
    assert plan_lines._commitment([_held(_plan())], JANUARY, -5, "USD") == []


YEAR_START, YEAR_END = datetime(2025, 1, 15, tzinfo=UTC), datetime(2026, 1, 15, tzinfo=UTC)


def _yearly(
    spent: int = 0,
    drawn: int = 0,
    corrections: tuple[Line, ...] = (),
    period: BillingPeriod = JANUARY,
    **fields: Any,
) -> list[tuple[Any, ...]]:
    plan = _plan(minimum_commitment=365 * CENT, interval=fields.pop("interval", "year"))
    held = [_held(plan, YEAR_START, **fields)]
    inputs = InvoiceInputs(drawn=[("acme", START, START, drawn * CENT)])
    used = (spent * CENT, corrections)
    return _shown(plan_lines._yearly_commitment(inputs, held, period, ACCOUNT, used))


def _correction(cents: int, ends: datetime) -> Line:
    return Line("adjustment", "x", cents * CENT, cents, ends - DAY, ends)


def test_a_commitment_of_a_year_is_owed_when_it_ends() -> None:
    def _owed(cents: int, start: str = "2025-01-15", last: str = "2026-01-15") -> list[Any]:
        text = f"Commitment of {start} to {last}, shortfall"
        return [("commitment", text, cents * CENT, cents, START, FEB)]

    assert _yearly() == _owed(365)
    assert _yearly(spent=5, drawn=60) == _owed(300)
    assert _yearly(spent=65, drawn=300) == [] and _yearly(spent=66, drawn=300) == []
    assert _yearly(spent=64, drawn=300) == _owed(1)
    of_year = _correction(7, YEAR_START + MOMENT)
    before = _correction(9, YEAR_START)
    assert _yearly(corrections=(of_year, before)) == _owed(358)
    assert _yearly(ends_at=START + 4 * DAY) == _owed(355, last="2026-01-05")
    assert _yearly(ends_at=START) == [], "it ended in the period before"
    assert _yearly(interval="month") == []
    ended = BillingPeriod(id="p", tenant_id="acme", starts_at=YEAR_END, ends_at=FEB)
    assert _yearly(period=ended) == [], "its end was in the period before"
    last = BillingPeriod(id="p", tenant_id="acme", starts_at=START, ends_at=YEAR_END)
    assert len(_yearly(period=last)) == 1
    short = BillingPeriod(id="p", tenant_id="acme", starts_at=START, ends_at=YEAR_END - MOMENT)
    assert _yearly(period=short) == []


def _rows(session: Session, name: str, scope: Any, start: datetime, end: datetime) -> list[Any]:
    session.flush()
    return [tuple(row) for row in SUBJECTS[name].rows(session, scope, Period(start, end))]


def test_the_ledger_of_a_span_is_exported_by_entry(lite: Deployment) -> None:
    lite.tenant("birch")
    with lite.database.transaction() as session:
        for name, tenant, at in (
            ("first", "acme", START),
            ("last", "acme", FEB - MOMENT),
            ("next", "acme", FEB),
            ("before", "acme", START - MOMENT),
            ("other", "birch", START),
        ):
            entries = transfer(AccountKind.CASH, AccountKind.REVENUE, Money(5, "USD"))
            post(session, Transaction(tenant, "payment", name, at, entries, f"memo {name}"))
        acme = _rows(session, "ledger", scope_of_operator("acme"), START, FEB)
        named = [(row[2], row[3], row[4], row[5], row[7], row[8], row[9], row[10]) for row in acme]
        assert named == [
            ("acme", "payment", "first", START, "memo first", "cash", 5, "USD"),
            ("acme", "payment", "first", START, "memo first", "revenue", -5, "USD"),
            ("acme", "payment", "last", FEB - MOMENT, "memo last", "cash", 5, "USD"),
            ("acme", "payment", "last", FEB - MOMENT, "memo last", "revenue", -5, "USD"),
        ]
        assert [row[0] for row in acme] == sorted(row[0] for row in acme)
        kinds = [each.kind.value for each in SUBJECTS["ledger"].columns]
        assert kinds == ["whole", *["text"] * 4, "moment", *["text"] * 3, "units", "text"]
        flags = {each.name for each in SUBJECTS["usage"].columns if each.kind.value == "flag"}
        assert flags == {"streamed"}
        assert len(_rows(session, "ledger", None, START, FEB)) == 6


def test_invoices_that_overlap_a_span_are_exported_line_by_line(session: Session) -> None:
    for number, start, end in ((1, START, FEB), (2, FEB, FEB + DAY), (3, START - DAY, START)):
        invoice_row(session, number, sent=False, status="draft", period_end=end)
        session.flush()
        session.get_one(Invoice, f"inv_{number:02}").period_start = start
        for position, project in ((2, "q"), (1, "p")):
            names = {"kind": "usage", "description": "x", "project_id": project}
            line = {"invoice_id": f"inv_{number:02}", "position": position, "exact": 7}
            session.add(InvoiceLine(amount_minor=0, starts_at=start, ends_at=end, **line, **names))

    def _found(start: datetime, end: datetime) -> list[tuple[Any, ...]]:
        places = [each.name for each in SUBJECTS["invoices"].columns]
        chosen = [places.index(each) for each in ("invoice_id", "position", "project_id")]
        return [
            tuple(row[place] for place in chosen)
            for row in _rows(session, "invoices", scope_of_operator("acme"), start, end)
        ]

    def _of(*numbers: int) -> list[tuple[Any, ...]]:
        return [
            (f"inv_{n:02}", at, project) for n in numbers for at, project in ((1, "p"), (2, "q"))
        ]

    assert _found(START, FEB) == _of(1)
    assert _found(START - MOMENT, FEB + MOMENT) == _of(3, 1, 2)
    assert _rows(session, "invoices", scope_of_operator("birch"), START, FEB) == []


def test_a_scope_narrows_what_is_wanted() -> None:
    span = Period(START, FEB)
    every = wanted_of(None, span)
    assert (every.tenant_id, every.project_id, every.start, every.end) == ("", "", START, FEB)
    own = wanted_of(scope_of_operator("acme"), span)
    assert (own.tenant_id, own.project_id) == ("acme", "")
    of_key = wanted_of(scope_of_key("acme", "p", "k", "member"), span)
    assert (of_key.tenant_id, of_key.project_id) == ("acme", "p")
