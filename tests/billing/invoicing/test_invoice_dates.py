"""Accounts, their periods, and when the invoice of a period may be drafted and become final."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.accounts import Periods, ensure_accounts, lock_account, set_anchor
from billing.accounts.tables import BillingAccount, Seller
from billing.invoicing import invoice_run, invoices
from billing.notices import webhooks
from billing.notices.tables import OutboxMessage
from billing.rating import rating
from billing.subscriptions.subscriptions import subscribe
from billing.subscriptions.tables import Plan
from billing.usage import usage
from core.errors import BadRequest, Conflict, NotFound
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import START, Deployment

CENT, DAY, INSTANT = 10**10, timedelta(days=1), timedelta(microseconds=1)
FEBRUARY, MARCH = datetime(2026, 2, 1, tzinfo=UTC), datetime(2026, 3, 1, tzinfo=UTC)


def test_an_account_is_made_as_its_tenant_says(lite: Deployment, session: Session) -> None:
    ensure_accounts(session, ["acme", "nobody"], START)
    made = {each.tenant_id: each for each in session.scalars(select(BillingAccount))}
    assert made.keys() == {"acme", "nobody"}
    other = made["nobody"]
    assert (other.currency, other.timezone, other.legal_name) == ("USD", "UTC", "nobody")
    assert (other.anchor_day, other.tax_exempt, other.prepaid_only) == (1, False, False)
    assert (other.created_at, other.collection, other.status) == (START, "manual", "active")
    seller = session.scalars(select(Seller)).one()
    assert (seller.next_number, seller.next_credit_note, seller.number_prefix) == (1, 1, "TH")
    with pytest.raises(NotFound, match="Tenant x has no billing account"):
        lock_account(session, "x")


def test_periods_fill_the_time_and_never_overlap(lite: Deployment, session: Session) -> None:
    account = lock_account(session, "acme")
    periods = Periods(session)
    january = periods.around(account, START + 5 * DAY)
    assert (january.starts_at, january.ends_at) == (START, FEBRUARY)
    assert periods.around(account, FEBRUARY - INSTANT) is january
    february = periods.around(account, FEBRUARY)
    assert (february.starts_at, february.ends_at) == (FEBRUARY, MARCH)
    session.flush()
    set_anchor(session, account, 15, START + 5 * DAY)
    moved = Periods(session).around(account, MARCH)
    assert (moved.starts_at, moved.ends_at) == (MARCH, MARCH + 14 * DAY)
    before = Periods(session).around(account, START - INSTANT)
    assert (before.starts_at, before.ends_at) == (START - 17 * DAY, START)
    for day in (0, 32):
        with pytest.raises(BadRequest, match=f"anchor_day is {day}; it must be 1 to 31"):
            set_anchor(session, account, day, START)
    session.flush()
    for known in (Periods(session), periods):
        known.load(["acme"], START)
        assert known.around(account, START).id == january.id
        assert known.billed_in(account, january, START) is january
    january.closed_at = FEBRUARY
    assert periods.billed_in(account, january, START) is february
    assert periods.billed_in(account, january, MARCH).id == moved.id
    february.closed_at = MARCH
    assert periods.billed_in(account, january, START).id == moved.id


def test_an_invoice_becomes_final_after_its_period_and_its_grace(
    lite: Deployment, session: Session
) -> None:
    webhooks.add(session, scope_of_operator("acme"), lite.clock, "https://hooks.example.com/i")
    fields = {"currency": "USD", "grace_hours": 5, "payment_terms_days": 9, "base_fee": 31 * CENT}
    session.add(Plan(id="pro", name="pro", created_at=START, **fields))
    session.flush()
    subscribe(session, "acme", "pro", START)
    usage.record(session, [lite.event()], lite.clock)
    (period_id,) = invoice_run.due_periods(session, ["acme"], START, current=True)["acme"]
    assert invoice_run.due_periods(session, ["acme"], FEBRUARY - INSTANT, current=False) == {}
    due = invoice_run.due_periods(session, ["acme"], FEBRUARY, current=True)["acme"]
    assert (len(due), due[0]) == (2, period_id)
    assert invoice_run.due_periods(session, ["acme"], FEBRUARY, current=False) == {
        "acme": [period_id]
    }
    lite.clock.set(FEBRUARY - INSTANT)
    with pytest.raises(Conflict, match="ends at 2026-02-01 00:00 UTC and cannot be closed before"):
        invoices.finalise(session, lite.clock, period_id)
    lite.clock.set(FEBRUARY)
    with pytest.raises(Conflict, match="is not rated yet"):
        invoices.finalise(session, lite.clock, period_id)
    rating.rate(session, lite.clock)
    drafted = invoices.draft(session, lite.clock, period_id)
    assert drafted is not None and (drafted.status, drafted.number) == ("draft", None)
    made = invoices.finalise(session, lite.clock, period_id)
    assert made is drafted and made.status == "final"
    assert invoices.draft(session, lite.clock, period_id) is made
    assert invoices.finalise(session, lite.clock, period_id) is made
    assert (made.number, made.label, made.final_at) == (1, "TH-000001", FEBRUARY)
    assert (made.due_at, made.total_minor, made.settled_at) == (FEBRUARY + 9 * DAY, 31, None)
    assert invoices.get(session, "TH-000001") is invoices.get(session, made.id)
    message = session.scalars(select(OutboxMessage)).one()
    assert message.subject == "Invoice TH-000001 is final"
    assert message.payload == {
        "event": "invoice.final",
        "invoice_id": made.id,
        "invoice": "TH-000001",
        "total": "0.31",
        "due": "0.31",
        "currency": "USD",
        "due_by": "2026-02-10",
    }
    for wrong in ("TH-000002", "inv_0"):
        with pytest.raises(NotFound, match=f"There is no invoice '{wrong}'"):
            invoices.get(session, wrong)
    with pytest.raises(NotFound, match="There is no billing period 'per_0'"):
        invoices.draft(session, lite.clock, "per_0")


@pytest.mark.parametrize(("hours", "final"), [(5, 1), (4, 0)])
def test_a_run_waits_for_the_grace_of_the_plan(lite: Deployment, hours: int, final: int) -> None:
    with lite.database.transaction() as session:
        fields = {"currency": "USD", "grace_hours": 5, "base_fee": 31 * CENT}
        session.add(Plan(id="pro", name="pro", created_at=START, **fields))
        session.flush()
        subscribe(session, "acme", "pro", START)
    lite.clock.set(FEBRUARY + timedelta(hours=hours))
    seen: list[tuple[int, int]] = []
    found = invoice_run.run(lite.database, lite.clock, progress=lambda *n: seen.append(n))
    assert (len(found.finalised), len(found.drafted), seen) == (final, 2 - final, [(1, 1)])
    again = invoice_run.run(lite.database, lite.clock, ["acme"], final=False, current=False)
    assert (again.finalised, len(again.drafted)) == ([], 1 - final)
    assert again.unchanged == found.finalised
    lite.clock.set(FEBRUARY + timedelta(days=45))
    assert invoice_run.run(lite.database, lite.clock, final=False).unchanged == []
