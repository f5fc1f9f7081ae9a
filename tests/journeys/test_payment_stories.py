"""Stories of payments on a fake clock, with the product's fake Stripe over HTTP on the other side."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from billing.accounts.accounts import lock_account
from billing.accounts.tables import BillingAccount
from billing.invoicing import credit_notes, open_amounts
from billing.notices.tables import OutboxMessage
from billing.payments import commands, dunning, settlement
from billing.payments.fake_stripe import payments
from billing.payments.tables import DunningCase
from billing.subscriptions import subscriptions
from billing.subscriptions.tables import Plan
from core.clock import FakeClock, SystemClock
from core.database import Database
from core.tenants.models import AuditEntry, Tenant
from core.tenants.organisations import change_tenant, set_unpaid
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import Deployment, deployment_of
from tests.billing.payments.stripe_deployment import Till, open_till
from tests.gateway.deployment import MODEL, running_deployment


@pytest.fixture
def till(sqlite_database: Database) -> Iterator[Till]:
    deployment = deployment_of(sqlite_database, FakeClock(datetime(2028, 1, 10, 9, 30, tzinfo=UTC)))
    with open_till(deployment) as made:
        _on_plan(deployment, suspend_after_days=10)
        yield made


def _on_plan(deployment: Deployment, suspend_after_days: int | None) -> None:
    with deployment.database.transaction() as session:
        plan = Plan(
            id="pro",
            name="pro",
            currency="USD",
            suspend_after_days=suspend_after_days,
            created_at=deployment.clock.now(),
        )
        session.add(plan)
        session.flush()
        subscriptions.subscribe(session, "acme", "pro", deployment.clock.now())
        lock_account(session, "acme").email = "money@acme.invalid"


def _pass(till: Till, days: int) -> None:
    """Day by day, with what is scheduled: dunning, outbox, inbox."""
    for _ in range(days):
        till.deployment.clock.advance(days=1)
        dunning.run(till.deployment.database, till.deployment.clock, till.provider)
        till.settle()
        dunning.settle(till.deployment.database, till.deployment.clock)


def _standing(till: Till) -> tuple[str, str]:
    with till.deployment.database.read() as session:
        return (
            session.get_one(Tenant, "acme").status,
            session.get_one(BillingAccount, "acme").status,
        )


def _mails(till: Till) -> list[str]:
    with till.deployment.database.read() as session:
        query = select(OutboxMessage.payload).order_by(OutboxMessage.id)
        return [str(each["event"]) for each in session.scalars(query)]


def test_a_failed_card_leads_to_suspension_and_a_good_one_to_reinstatement(till: Till) -> None:
    till.leave_card("0341")
    till.settle()
    invoice = till.invoice(12)
    till.settle()
    assert till.payments()[0].status == "failed"
    _pass(till, 1)
    assert _standing(till) == ("active", "past_due")
    assert _mails(till) == ["invoice.reminder"]
    with till.deployment.database.read() as session:
        (reminder,) = session.scalars(select(OutboxMessage))
    hosted = [each["hosted_invoice_url"] for each in till.stripe.books.all("invoice")]
    assert [reminder.payload["pay_at"]] == hosted, "where the customer can pay it"
    _pass(till, 8)
    assert _mails(till) == ["invoice.reminder"] * 3  # on days 0, 3 and 7
    tried = [each for each in till.stripe.books.all("charge") if each["status"] == "failed"]
    assert len(tried) == 3, "the first time, and on days 3 and 7"
    assert _standing(till) == ("active", "past_due")
    _pass(till, 16)  # 14 days of terms and 10 of the plan have passed
    assert _standing(till) == ("unpaid", "suspended")
    assert "invoice.suspended" in _mails(till)
    till.leave_card("4242")
    till.settle()  # it is tried as soon as we hear of it
    assert till.read(invoice.id).status == "paid"
    dunning.settle(till.deployment.database, till.deployment.clock)
    assert _standing(till) == ("active", "active")
    assert _mails(till)[-1] == "invoice.reinstated"
    with till.deployment.database.read() as session:
        assert session.scalars(select(DunningCase.outcome)).all() == ["paid"]
        acts = session.scalars(select(AuditEntry.action).where(AuditEntry.actor == "dunning"))
        assert acts.all() == ["tenant.suspend", "tenant.reinstate"]
    till.audited()


def test_without_a_plan_that_says_so_nobody_is_suspended(till: Till) -> None:
    with till.deployment.database.transaction() as session:
        session.get_one(Plan, "pro").suspend_after_days = None
    till.invoice(12)
    _pass(till, 60)
    assert _standing(till) == ("active", "past_due")
    assert _mails(till) == ["invoice.reminder"] * len(dunning.REMINDERS)


def test_a_payment_by_wire_reinstates_as_well(till: Till) -> None:
    invoice = till.invoice(12)
    _pass(till, 25)
    assert _standing(till)[0] == "unpaid"
    with till.deployment.database.transaction() as session:
        now = till.deployment.clock.now()
        paid = settlement.begin_payment(
            session,
            tenant_id="acme",
            invoice_id=invoice.id,
            amount_minor=1200,
            currency="USD",
            provider="manual",
            reference="manual:wire",
            at=now,
        )
        settlement.succeed(session, paid, now)
    assert dunning.settle(till.deployment.database, till.deployment.clock) == 1
    assert _standing(till) == ("active", "active")


def test_what_the_operator_suspended_stays_so(till: Till) -> None:
    invoice = till.invoice(12)
    with till.deployment.database.transaction() as session:
        scope = scope_of_operator("acme")
        change_tenant(session, scope, till.deployment.clock, status="suspended")
    _pass(till, 25)
    assert _standing(till) == ("suspended", "suspended")
    with till.deployment.database.transaction() as session:
        settlement.write_off(session, invoice.id, till.deployment.clock.now())
    dunning.settle(till.deployment.database, till.deployment.clock)
    assert _standing(till) == ("suspended", "active")


def test_one_of_two_invoices_paid_is_not_enough(till: Till) -> None:
    first = till.invoice(12)
    second = till.invoice(6)
    _pass(till, 25)
    for invoice, left in ((first, "unpaid"), (second, "active")):
        with till.deployment.database.transaction() as session:
            settlement.void(session, invoice.id, till.deployment.clock.now(), "goodwill")
        dunning.settle(till.deployment.database, till.deployment.clock)
        assert _standing(till)[0] == left


def test_dunning_that_runs_again_and_again_changes_nothing(till: Till) -> None:
    till.leave_card("0341")
    till.settle()
    till.invoice(12)
    till.settle()
    for _ in range(5):
        dunning.run(till.deployment.database, till.deployment.clock, till.provider)
    till.settle()
    assert _mails(till) == ["invoice.reminder"]
    assert len(till.stripe.books.all("charge")) == 1


def test_a_dispute_that_is_lost_opens_the_case_anew(till: Till) -> None:
    till.leave_card()
    till.settle()
    invoice = till.invoice(12)
    till.settle()
    (paid,) = till.payments()
    assert paid.external_id is not None
    made = payments.open_dispute(till.stripe.books, paid.external_id)
    payments.close_dispute(till.stripe.books, made["id"], "lost")
    _pass(till, 30)
    assert till.read(invoice.id).status == "final"
    assert _standing(till) == ("unpaid", "suspended")
    assert len(till.stripe.books.all("charge")) == 1, "a card that was charged back is left alone"


def test_a_refund_and_a_credit_note_through_stripe_leave_nothing_open(till: Till) -> None:
    till.leave_card()
    till.settle()
    invoice = till.invoice(12)
    till.settle()
    (paid,) = till.payments()
    with till.deployment.database.transaction() as session:
        now = till.deployment.clock.now()
        note = credit_notes.issue(
            session,
            invoice_id=invoice.id,
            net_minor=500,
            reason="an outage",
            reference="outage",
            at=now,
            refund=True,
        )
        commands.request_refund(session, paid.id, 500, "outage", now, reason=note.label)
    till.settle()
    assert open_amounts.open_minor(till.read(invoice.id)) == 0
    assert till.cash() == 7 * 10**12
    assert till.stripe.books.all("refund")[0]["amount"] == 500
    _pass(till, 30)
    assert _standing(till) == ("active", "active")
    till.audited()


def test_a_suspended_tenant_is_refused_and_served_again_once_it_paid(tmp_path: Path) -> None:
    with running_deployment(tmp_path) as deployment:
        database, tenant = deployment.services.database, deployment.tenant_id

        def _ask() -> httpx.Response:
            body = {
                "model": MODEL,
                "max_tokens": 2,
                "messages": [{"role": "user", "content": "Hi"}],
            }
            url = f"{deployment.url}/v1/chat/completions"
            return httpx.post(url, json=body, headers=deployment.headers, timeout=60)

        def _until(status: int) -> httpx.Response:
            deadline = time.monotonic() + 60
            while (answer := _ask()).status_code != status:
                assert time.monotonic() < deadline, answer.text
                time.sleep(0.05)
            return answer

        _until(200)
        with database.transaction() as session:
            assert set_unpaid(session, SystemClock(), tenant, True)
        refused = _until(429)
        assert refused.json()["error"]["code"] == "insufficient_quota"
        assert refused.headers["x-should-retry"] == "false"
        assert "overdue" in refused.json()["error"]["message"]
        for free in ("/admin/v1/invoices", "/v1/models", "/admin/v1/billing"):
            assert (
                httpx.get(f"{deployment.url}{free}", headers=deployment.headers).status_code == 200
            )
        blocked = httpx.post(
            f"{deployment.url}/v1/moderations", json={"input": "x"}, headers=deployment.headers
        )
        assert blocked.status_code == 429
        with database.transaction() as session:
            assert set_unpaid(session, SystemClock(), tenant, False)
        _until(200)


def test_smart_retries_leave_the_card_to_stripe(till: Till) -> None:
    till.leave_card("0341")
    till.settle()
    till.invoice(12)
    for _ in range(20):
        till.deployment.clock.advance(timedelta(days=1).total_seconds())
        dunning.run(till.deployment.database, till.deployment.clock, till.provider, retries=False)
        till.settle()
    assert len(till.stripe.books.all("charge")) == 1
    assert _mails(till) == ["invoice.reminder"] * 4
