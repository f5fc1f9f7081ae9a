"""The outbox: what Stripe is told, once, whatever breaks on the way."""

from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from billing import tasks
from billing.accounts.tables import BillingAccount
from billing.invoicing import credit_notes, invoice_run
from billing.ledger import credits
from billing.payments import commands, leases, push, settlement
from billing.payments.base import PaymentProvider
from billing.payments.fake_stripe.faults import Fault
from billing.payments.provider_bills import bill_of
from billing.payments.tables import PaymentCommand, PaymentMethod
from core import metrics
from core.money import Money, units_of
from core.queue import TaskContext
from core.settings import Settings
from tests.billing.payments.stripe_deployment import Till


def test_who_leaves_a_card_is_collected_by_stripe_and_the_invoice_is_paid(both: Till) -> None:
    till = both
    till.leave_card()
    till.settle()
    with till.deployment.database.read() as session:
        assert session.get_one(BillingAccount, "acme").collection == "stripe"
        (method,) = session.scalars(select(PaymentMethod))
        assert method.label == "Visa 4242"
    invoice = till.invoice(12)
    till.settle()
    paid = till.read(invoice.id)
    assert (paid.status, paid.paid_minor) == ("paid", invoice.due_minor)
    (sent,) = till.stripe.books.all("invoice")
    assert (sent["number"], sent["total"]) == (invoice.label, invoice.due_minor)
    assert [each.status for each in till.payments()] == ["succeeded"]
    assert till.cash() == units_of("12")
    till.audited()
    before = len(till.stripe.calls)
    assert (till.push().done, till.bring(), till.apply().done) == (0, 0, 0)
    assert len(till.stripe.calls) == before, "a second run has nothing to say"


def test_the_lines_at_stripe_say_what_was_used_and_what_was_given(till: Till) -> None:
    till.collect_by_stripe()
    with till.deployment.database.transaction() as session:
        for kind, amount in (("promo", "2"), ("prepaid", "3")):
            credits.grant(
                session,
                tenant_id="acme",
                kind=kind,
                money=Money(units_of(amount)),
                reference=kind,
                at=till.deployment.clock.now(),
            )
    invoice = till.invoice(12)
    with till.deployment.database.read() as session:
        bill = bill_of(session, invoice)
    assert [line.amount_minor for line in bill.lines][-2:] == [-200, -300]
    assert sum(line.amount_minor for line in bill.lines) == bill.due_minor == 700
    assert [line.position for line in bill.lines] == [*range(1, len(bill.lines) + 1)]
    till.settle()
    assert till.stripe.books.all("invoice")[0]["total"] == 700


@pytest.mark.parametrize(("terms", "days"), [(0, 1), (1, 1), (30, 30), (None, 1)])
def test_an_invoice_that_is_due_at_once_gives_the_provider_a_day(
    till: Till, terms: int | None, days: int
) -> None:
    invoice = till.invoice(12)
    assert invoice.final_at is not None
    invoice.due_at = None if terms is None else invoice.final_at + timedelta(days=terms)
    with till.deployment.database.read() as session:
        assert bill_of(session, invoice).days_to_pay == days


def test_an_invoice_of_many_lines_is_summed_for_stripe(till: Till) -> None:
    for number in range(300):
        used = till.deployment.event(project_id=f"p{number}", output_tokens=1_000_000)
        till.deployment.record(used)
    till.collect_by_stripe()
    invoice = till.invoice(1)
    with till.deployment.database.read() as session:
        bill = bill_of(session, invoice)
    assert len(bill.lines) < 10 and "lines of our invoice" in bill.lines[0].description
    assert sum(line.amount_minor for line in bill.lines) == invoice.due_minor


@pytest.mark.parametrize("fault", [Fault.LIMITED, Fault.BROKEN, Fault.TIMEOUT_AFTER, Fault.LOST])
def test_the_outbox_backs_off_and_tells_once(till: Till, fault: Fault) -> None:
    till.leave_card()
    till.settle()
    till.stripe.faults.plan("POST /v1/invoices", *[fault] * 4)
    invoice = till.invoice(12)
    first = till.push()
    assert (first.done, first.later) == (0, 1)
    with till.deployment.database.read() as session:
        query = select(PaymentCommand).where(PaymentCommand.done_at.is_(None))
        (waiting,) = session.scalars(query)
        assert waiting.last_error and waiting.next_at > till.deployment.clock.now()
    assert till.push().later == 0, "before its time nothing is tried"
    till.settle()
    assert till.read(invoice.id).status == "paid"
    assert len(till.stripe.books.all("charge", status="succeeded")) == 1
    assert till.cash() == units_of("12")


def test_a_pusher_that_dies_after_stripe_did_it_loses_and_doubles_nothing(
    till: Till, monkeypatch: pytest.MonkeyPatch
) -> None:
    till.leave_card()
    till.settle()
    invoice = till.invoice(12)
    finish = push._finish
    deaths = []

    def _dies(*_: object) -> None:
        deaths.append(1)
        raise KeyboardInterrupt

    for _ in range(3):
        monkeypatch.setattr(push, "_finish", _dies)
        with pytest.raises(KeyboardInterrupt):
            till.push()
        monkeypatch.setattr(push, "_finish", finish)
        till.deployment.clock.advance(seconds=leases.LEASE_S + 1)
    till.settle()
    assert len(deaths) == 3 and till.read(invoice.id).status == "paid"
    assert len(till.stripe.books.all("invoice")) == 1
    assert till.cash() == units_of("12")


def test_a_credit_note_lowers_what_stripe_collects(till: Till) -> None:
    till.collect_by_stripe()
    invoice = till.invoice(12)
    till.settle()  # sent; there is no card yet
    with till.deployment.database.transaction() as session:
        credit_notes.issue(
            session,
            invoice_id=invoice.id,
            net_minor=500,
            reason="an outage",
            reference="outage",
            at=till.deployment.clock.now(),
        )
    till.settle()
    (sent,) = till.stripe.books.all("invoice")
    assert (sent["status"], sent["amount_remaining"]) == ("open", 700)
    till.leave_card()
    till.settle()
    with till.deployment.database.transaction() as session:
        again = session.merge(till.read(invoice.id))
        commands.collect_again(session, "stripe", again, "1", till.deployment.clock.now())
    till.settle()
    assert till.read(invoice.id).status == "paid" and till.cash() == units_of("7")
    till.audited()


def test_the_tasks_push_and_apply_by_the_provider_and_say_how_much(
    till: Till, tmp_path: Path
) -> None:
    till.leave_card()
    till.settle()
    invoice = till.invoice(12)
    made = till.deployment
    services = {PaymentProvider: till.provider}
    context = TaskContext(Settings(data_dir=tmp_path), made.database, made.clock, services)
    pushed = [tasks.push_payments(context) for _ in range(3)]
    assert sum(pushed) > 0 and pushed[-1] == 0
    assert till.bring() > 0
    counted = metrics.payment_events.labels("done")._value.get()
    applied = tasks.apply_webhooks(context)
    assert applied > 0 and tasks.apply_webhooks(context) == 0
    assert metrics.payment_events.labels("done")._value.get() == counted + applied
    assert till.read(invoice.id).status == "paid"
    without = TaskContext(Settings(data_dir=tmp_path), made.database, made.clock, {})
    assert (tasks.push_payments(without), tasks.apply_webhooks(without)) == (0, 0)


def test_an_invoice_is_not_collected_while_what_lowers_it_is_on_its_way(till: Till) -> None:
    till.collect_by_stripe()
    invoice = till.invoice(12)
    till.settle()
    till.leave_card()
    with till.deployment.database.transaction() as session:
        now, again = till.deployment.clock.now(), session.merge(till.read(invoice.id))
        credit_notes.issue(
            session, invoice_id=again.id, net_minor=500, reason="x", reference="x", at=now
        )
        session.flush()
        commands.plan(session, "stripe", now)
        commands.collect_again(session, "stripe", again, "1", now)
        lower = select(PaymentCommand).where(PaymentCommand.kind == commands.LOWER)
        session.scalars(lower).one().next_at = now + timedelta(days=1)
    assert till.push().later == 1
    assert till.read(invoice.id).status == "final"
    till.deployment.clock.advance(days=2)
    till.settle()
    assert till.read(invoice.id).status == "paid" and till.cash() == units_of("7")


@pytest.mark.parametrize("part", [500, 1200])
def test_money_that_came_by_another_way_is_not_collected_again(till: Till, part: int) -> None:
    till.collect_by_stripe()
    invoice = till.invoice(12)
    till.settle()
    with till.deployment.database.transaction() as session:
        paid = settlement.begin_payment(
            session,
            tenant_id="acme",
            invoice_id=invoice.id,
            amount_minor=part,
            currency="USD",
            provider="manual",
            reference="manual:wire",
            at=till.deployment.clock.now(),
        )
        settlement.succeed(session, paid, till.deployment.clock.now())
    till.settle()
    (sent,) = till.stripe.books.all("invoice")
    assert sent["amount_remaining"] == 1200 - part
    assert sent["status"] == ("paid" if part == 1200 else "open")


@pytest.mark.parametrize("how", ["void", "uncollectible"])
def test_what_is_void_or_written_off_is_closed_at_stripe(till: Till, how: str) -> None:
    till.collect_by_stripe()
    invoice = till.invoice(12)
    till.settle()
    with till.deployment.database.transaction() as session:
        now = till.deployment.clock.now()
        if how == "void":
            settlement.void(session, invoice.id, now, "wrong tenant")
        else:
            settlement.write_off(session, invoice.id, now)
    till.settle()
    assert till.stripe.books.all("invoice")[0]["status"] == how


def test_two_pushers_at_once_tell_once(both: Till) -> None:
    from concurrent.futures import ThreadPoolExecutor

    till = both
    till.leave_card()
    till.settle()
    for tenant in ("bolt", "corp"):
        till.deployment.tenant(tenant)
        till.leave_card(tenant_id=tenant)
    till.settle()
    made = [till.invoice(6, tenant) for tenant in ("acme", "bolt", "corp")]
    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(till.push) for _ in range(4)]:
            each.result()
    till.settle()
    assert {till.read(each.id).status for each in made} == {"paid"}
    assert len(till.stripe.books.all("invoice")) == 3
    assert len(till.stripe.books.all("charge", status="succeeded")) == 3


def test_a_stripe_that_is_away_is_not_asked_for_every_command(till: Till) -> None:
    for number in range(8):
        till.deployment.tenant(f"firm{number}")
        till.collect_by_stripe(f"firm{number}")
        till.deployment.record(
            till.deployment.event(tenant_id=f"firm{number}", output_tokens=10_000_000)
        )
    till.deployment.clock.advance(days=40)
    assert not invoice_run.run(till.deployment.database, till.deployment.clock).failed
    till.stripe.faults.rate = 1.0
    till.stripe.faults.rng.choice = lambda _: Fault.LOST  # type: ignore[method-assign]
    before = len(till.stripe.calls)
    assert till.push().later == leases.MAX_UNANSWERED
    assert len(till.stripe.calls) - before == leases.MAX_UNANSWERED
    till.stripe.faults.rate = 0.0
    till.settle()
    assert len(till.stripe.books.all("invoice", status="open")) == 8
