"""Runs of the outbox against a provider that answers as a test says: what is tried when, how often, what
is kept of it, and what of it is shown."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from billing.accounts.tables import BillingAccount
from billing.payments import commands, leases, push, settlement
from billing.payments.base import (
    Attempt,
    Charge,
    Customer,
    Refused,
    TryLater,
    UsageReport,
)
from billing.payments.push import Pushed
from billing.payments.tables import Dispute, Payment, PaymentCommand, PaymentWebhook, Refund
from billing.payments.views import describe_command, describe_event
from core.errors import BadRequest, Conflict, NotFound
from tests.billing.conftest import START, Deployment
from tests.billing.payments.provider_rows import command_row, invoice_row, payment_row
from tests.billing.payments.scripted_payments import Scripted


@pytest.fixture
def bank(lite: Deployment) -> Scripted:
    return Scripted(lite.clock)


def usage_row(lite: Deployment, name: str, **fields: Any) -> None:
    payload = {"meter": "tokens", "value": 7, "at": "2026-01-01T05:00:00+00:00"}
    with lite.database.transaction() as session:
        command_row(session, name, "usage", done_at=None, payload=payload, **fields)


def deliver(lite: Deployment, bank: Scripted, limit: int = 500) -> Pushed:
    return push.deliver(lite.database, lite.clock, bank, limit)


def command(lite: Deployment, subject: str = "a") -> PaymentCommand:
    with lite.database.read() as session:
        query = select(PaymentCommand).where(PaymentCommand.subject_id == subject)
        return session.scalars(query).one()


def test_a_command_backs_off_and_keeps_the_last_reason(lite: Deployment, bank: Scripted) -> None:
    usage_row(lite, "a")
    push.customer_of(lite.database, lite.clock, bank, "acme")
    bank.asked.clear()
    bank.plan = [TryLater("x" * 600), TryLater("asked to wait", 7200.0), TryLater("short", 0.5)]
    assert deliver(lite, bank) == Pushed(0, 1, 0)
    first = command(lite)
    assert (first.attempts, first.last_error, first.failed) == (1, "x" * 500, False)
    pause = first.next_at - lite.clock.now()
    assert pause == timedelta(seconds=leases.pause_s("stripe:usage:a", 1))
    assert timedelta(seconds=3.75) <= pause < timedelta(seconds=6.25)
    assert deliver(lite, bank) == Pushed(0, 0, 0), "not before its time"
    lite.clock.set(first.next_at)
    assert deliver(lite, bank) == Pushed(0, 1, 0)
    assert command(lite).next_at == lite.clock.now() + timedelta(hours=2)
    lite.clock.advance(hours=2)
    assert deliver(lite, bank) == Pushed(0, 1, 0)
    pause = command(lite).next_at - lite.clock.now()
    assert timedelta(seconds=15) <= pause < timedelta(seconds=25)
    lite.clock.advance(minutes=1)
    assert deliver(lite, bank) == Pushed(1, 0, 0)
    done = command(lite)
    assert (done.attempts, done.last_error, done.done_at) == (4, None, lite.clock.now())
    report = UsageReport(
        "stripe:usage:a", "tokens", "cus-acme", 7, datetime(2026, 1, 1, 5, tzinfo=UTC)
    )
    assert bank.asked == [("usage", report)] * 4


def test_a_command_that_is_rejected_is_left_to_a_person(lite: Deployment, bank: Scripted) -> None:
    usage_row(lite, "a")
    usage_row(lite, "b")
    push.customer_of(lite.database, lite.clock, bank, "acme")
    bank.plan = [Refused("y" * 600), BadRequest("no such thing")]
    assert deliver(lite, bank) == Pushed(0, 0, 2)
    found = command(lite)
    assert (found.failed, found.last_error, found.done_at) == (True, "y" * 500, None)
    assert command(lite, "b").failed
    lite.clock.advance(days=1)
    assert deliver(lite, bank) == Pushed(0, 0, 0)


def test_three_unanswered_calls_end_a_run_and_an_answer_between_them_does_not(
    lite: Deployment, bank: Scripted
) -> None:
    for name in "abcdefgh":
        usage_row(lite, name)
    push.customer_of(lite.database, lite.clock, bank, "acme")

    answers = [False, False, True, False, False, False]

    class _Sometimes(Scripted):
        def report_usage(self, report: UsageReport) -> None:
            if not answers.pop(0):
                raise TryLater("away")

    assert deliver(lite, _Sometimes(lite.clock)) == Pushed(1, 5, 0)
    assert answers == []
    assert deliver(lite, bank, limit=1) == Pushed(1, 0, 0)
    assert deliver(lite, bank) == Pushed(1, 0, 0)


def test_a_lease_is_three_minutes_and_the_next_attempt_looks_first(
    lite: Deployment, bank: Scripted
) -> None:
    with lite.database.transaction() as session:
        payment_row(session, "a", external_id=None, status="pending")
        commands.charge(session, session.get_one(Payment, "pay_a"), START)
        session.get_one(BillingAccount, "acme").payment_methods = ["card"]
    bank.leave_card("cus-acme")
    push.customer_of(lite.database, lite.clock, bank, "acme")
    bank.asked.clear()
    bank.plan = [KeyboardInterrupt()]  # type: ignore[list-item]
    with pytest.raises(KeyboardInterrupt):
        deliver(lite, bank)
    held = command(lite, "pay_a")
    assert held.next_at == START + timedelta(minutes=3)
    lite.clock.advance(minutes=2, seconds=59)
    assert deliver(lite, bank) == Pushed()
    lite.clock.advance(seconds=1)
    assert deliver(lite, bank) == Pushed(1, 0, 0)
    words = "Top-up of the prepaid balance"
    wanted = Charge("pay_a", "acme", "USD", 500, words, ("card",))
    assert bank.asked == [
        ("charge", "cus-acme", wanted, "charge:pay_a", False),
        ("charge", "cus-acme", wanted, "charge:pay_a", True),
    ]
    with lite.database.read() as session:
        paid = session.get_one(Payment, "pay_a")
        assert (paid.status, paid.external_id) == ("succeeded", "pay-pay_a")


@pytest.mark.parametrize(
    ("attempts", "least", "most"),
    [
        (1, 3.75, 6.25),
        (2, 7.5, 12.5),
        (5, 60, 100),
        (10, 1920, 3200),
        (11, 2700, 4500),
        (99, 2700, 4500),
    ],
)
def test_pauses_double_up_to_an_hour(attempts: int, least: float, most: float) -> None:
    found = [leases.pause_s(f"key {n}", attempts) for n in range(200)]
    assert least <= min(found) < least * 1.05 and most * 0.95 < max(found) < most


def test_a_customer_is_opened_once_under_a_key_of_its_name(
    lite: Deployment, bank: Scripted
) -> None:
    with lite.database.transaction() as session:
        account = session.get_one(BillingAccount, "acme")
        account.legal_name, account.email = "Acme Inc", "pay@acme.example"
    bank.plan = [TryLater("away")]
    with pytest.raises(TryLater):
        push.customer_of(lite.database, lite.clock, bank, "acme")
    for _ in range(2):
        assert push.customer_of(lite.database, lite.clock, bank, "acme") == "cus-acme"
    lite.tenant("birch")
    with lite.database.transaction() as session:
        session.get_one(BillingAccount, "birch").legal_name = ""
    assert push.customer_of(lite.database, lite.clock, bank, "birch") == "cus-birch"
    (kind, first, key), second, third = bank.asked
    assert (kind, first) == ("customer", Customer("acme", "Acme Inc", "pay@acme.example"))
    assert second == (kind, first, key) and key.startswith("customer:acme:") and len(key) == 22
    assert third[1] == Customer("birch", "birch", "")


def test_refunds_of_the_outbox(lite: Deployment, bank: Scripted) -> None:
    with lite.database.transaction() as session:
        payment_row(session, "a", status="pending")
        payment_row(session, "m", status="pending", provider="manual")
        for name in ("pay_a", "pay_m"):
            settlement.succeed(session, session.get_one(Payment, name), START)
        by_hand = commands.request_refund(session, "pay_m", None, "hand", START, reason="kind")
        assert (by_hand.amount_minor, by_hand.status, by_hand.reason) == (500, "succeeded", "kind")
        made = commands.request_refund(session, "pay_a", 200, "good", START)
        assert (made.amount_minor, made.status) == (200, "pending")
        assert commands.request_refund(session, "pay_a", 200, "good", START) is made
        refused = commands.request_refund(session, "pay_a", None, "rest", START)
        assert refused.amount_minor == 300
        ids = made.id, refused.id
        with pytest.raises(NotFound, match="There is no payment 'pay_x'"):
            commands.request_refund(session, "pay_x", 1, "x", START)
    bank.plan = []
    bank.asked.clear()
    assert deliver(lite, bank, limit=1) == Pushed(1, 0, 0)
    bank.plan = [Refused("too old")]
    assert deliver(lite, bank) == Pushed(1, 0, 0)
    assert bank.asked == [
        ("refund", "pi_a", 200, "good", False),
        ("refund", "pi_a", 300, "rest", False),
    ]
    with lite.database.transaction() as session:
        states = [session.get_one(Refund, each) for each in ids]
        assert [(each.status, each.external_id) for each in states] == [
            ("succeeded", "re_1"),
            ("failed", None),
        ]
        assert states[1].reason == "(too old)"
        dispute = {"provider": "stripe", "currency": "USD", "amount_minor": 1, "status": "open"}
        session.add(
            Dispute(
                id="d",
                payment_id="pay_a",
                external_id="dp",
                opened_at=START,
                withdrawn=True,
                **dispute,
            )
        )
        session.flush()
        with pytest.raises(Conflict, match="Payment pay_a is disputed"):
            commands.request_refund(session, "pay_a", 1, "more", START)
        session.get_one(Dispute, "d").withdrawn = False
        assert commands.request_refund(session, "pay_a", 1, "more", START).status == "pending"


def _planned(lite: Deployment) -> list[tuple[Any, ...]]:
    with lite.database.transaction() as session:
        before = set(session.scalars(select(PaymentCommand.idempotency_key)))
        count = commands.plan(session, "stripe", START)
        rows = session.scalars(select(PaymentCommand).order_by(PaymentCommand.id))
        new = [each for each in rows if each.idempotency_key not in before]
        assert (len(new), commands.plan(session, "stripe", START)) == (count, 0)
        return [(r.idempotency_key, r.tenant_id, r.subject_id, r.payload) for r in new]


def test_what_is_planned_for_each_invoice(lite: Deployment) -> None:
    with lite.database.transaction() as session:
        session.get_one(BillingAccount, "acme").collection = "stripe"
        invoice_row(session, 1, sent=False, external_id=None)
        invoice_row(session, 2, sent=False, external_id=None, due_minor=0)
        invoice_row(session, 3, sent=False, external_id=None, status="paid")
        invoice_row(session, 4, sent=False, external_id="in_04")  # of another provider
        states = ("final", "void", "uncollectible", "paid", "final")
        for number, status in enumerate(states, 5):
            invoice_row(session, number, sent=False, status=status)
            command_row(session, f"inv_{number:02}", key=f"invoice:inv_{number:02}")
        for name, number, provider, status in (
            ("elsewhere", 5, "manual", "succeeded"),
            ("failed", 5, "manual", "failed"),
            ("there", 5, "stripe", "succeeded"),
            ("whole", 8, "manual", "succeeded"),
        ):
            fields = {"provider": provider, "status": status, "invoice_id": f"inv_{number:02}"}
            payment_row(session, name, **fields)
    lower = {"amount_minor": 500, "reason": "Paid by other means"}
    assert _planned(lite) == [
        ("invoice:inv_01", "acme", "inv_01", {}),
        ("lower:pay_elsewhere", "acme", "inv_05", lower),
        ("close:pay_whole", "acme", "inv_08", {"how": "paid_elsewhere"}),
        ("close:inv_06:void", "acme", "inv_06", {"how": "void"}),
        ("close:inv_07:uncollectible", "acme", "inv_07", {"how": "uncollectible"}),
        ("collect:inv_09:0", "acme", "inv_09", {}),
    ]
    with lite.database.transaction() as session:
        for each in session.scalars(select(PaymentCommand)):
            each.done_at = START
    assert _planned(lite) == [("collect:inv_05:0", "acme", "inv_05", {})]


def test_what_is_shown_of_commands_and_events() -> None:
    row = PaymentCommand(
        idempotency_key="k",
        tenant_id="acme",
        attempts=2,
        next_at=START,
        last_error="why",
        failed=False,
    )
    shown = {
        "key": "k",
        "tenant_id": "acme",
        "state": "waiting",
        "attempts": 2,
        "next_at": "2026-01-01T00:00:00+00:00",
        "last_error": "why",
    }
    assert describe_command(row) == shown
    row.failed = True
    assert describe_command(row) == shown | {"state": "refused"}
    row.done_at = START
    assert describe_command(row) == shown | {"state": "done", "next_at": None}
    heard = PaymentWebhook(
        external_id="e",
        type="x",
        subject_id="in_1",
        received_at=START,
        attempts=3,
        last_error="why",
    )
    told = {
        "id": "e",
        "type": "x",
        "about": "in_1",
        "state": "waiting",
        "received_at": "2026-01-01T00:00:00+00:00",
        "attempts": 3,
        "reason": "why",
    }
    assert describe_event(heard) == told
    heard.done_at = START
    assert describe_event(heard) == told | {"state": "done"}
    heard.parked = "strange"
    assert describe_event(heard) == told | {"state": "parked", "reason": "strange"}


def test_an_attempt_turns_its_keys() -> None:
    saved: list[dict[str, Any]] = []
    attempt = Attempt("key", save=lambda progress: saved.append(dict(progress)))
    assert attempt.key_of("pay") == "key:pay" and not attempt.again
    attempt.turn("pay")
    attempt.turn("pay")
    assert (attempt.key_of("pay"), attempt.key_of("other")) == ("key:pay:2", "key:other")
    assert saved == [{"turn:pay": 1}, {"turn:pay": 2}]
    Attempt("other").keep("step", 5)
