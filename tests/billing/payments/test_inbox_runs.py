"""Runs of the inbox against a provider that answers as a test says: what is fetched and what is kept."""

from datetime import timedelta

import pytest

from billing.payments import inbox, leases
from billing.payments.base import (
    Gone,
    PaymentState,
    ProviderEvent,
    TryLater,
)
from billing.payments.inbox import Applied
from billing.payments.tables import PaymentWebhook
from core.errors import Conflict, NotFound, TollhouseError
from tests.billing.conftest import START, Deployment
from tests.billing.payments.provider_rows import event_row, payment_row
from tests.billing.payments.scripted_payments import Scripted


@pytest.fixture
def bank(lite: Deployment) -> Scripted:
    return Scripted(lite.clock)


def receive(lite: Deployment, name: str, kind: str = "payment", subject: str = "pi_a") -> bool:
    event = ProviderEvent(name, "t" * 90, kind, subject, START, {"a": 1})
    with lite.database.transaction() as session:
        return inbox.receive(session, "stripe", event, lite.clock.now())


def event(lite: Deployment, name: str) -> PaymentWebhook:
    with lite.database.read() as session:
        return session.get_one(PaymentWebhook, ("stripe", name))


def apply(lite: Deployment, bank: Scripted, limit: int = 500) -> Applied:
    return inbox.apply(lite.database, lite.clock, bank, limit)


def test_an_event_is_stored_once(lite: Deployment) -> None:
    assert receive(lite, "e1") is True and receive(lite, "e1", "refund") is False
    found = event(lite, "e1")
    kept = (found.type, found.kind, found.subject_id, found.payload, found.attempts)
    assert kept == ("t" * 80, "payment", "pi_a", {"a": 1}, 0)
    assert (found.occurred_at, found.received_at, found.next_at) == (START, START, START)
    assert (found.done_at, found.parked) == (None, None)
    assert receive(lite, "e2", "nothing") and event(lite, "e2").done_at == START
    assert receive(lite, "e3", "unknown")
    assert event(lite, "e3").parked == f"The event type '{'t' * 90}' is unknown."


def test_one_fetch_is_for_all_events_of_its_object_that_came_before_it(
    lite: Deployment, bank: Scripted
) -> None:
    with lite.database.transaction() as session:
        payment_row(session, "a", status="pending")
        event_row(session, "pi_a", kind="payment", parked="strange")
    receive(lite, "e1")
    lite.clock.advance(minutes=1)
    receive(lite, "e2")
    receive(lite, "e3", "invoice", "in_x")

    class _Slow(Scripted):
        def payment(self, external_id: str) -> PaymentState:
            lite.clock.advance(seconds=1)
            receive(lite, "e4")  # as it is fetched
            return super().payment(external_id)

    slow = _Slow(lite.clock)
    assert apply(lite, slow, limit=1) == Applied(2, 0, 0)
    assert event(lite, "e1").done_at == event(lite, "e2").done_at == lite.clock.now()
    assert event(lite, "e3").done_at is None and event(lite, "e4").done_at is None
    assert event(lite, "evt_pi_a").done_at is None
    assert apply(lite, bank) == Applied(2, 0, 0)
    assert bank.asked == [("invoice", "in_x"), ("payment", "pi_a")]
    assert event(lite, "e3").last_error == "not ours: invoice in_x"
    assert event(lite, "e4").last_error is None


@pytest.mark.parametrize("error", [NotFound("gone away"), Conflict("z" * 600)])
def test_an_event_that_cannot_be_applied_is_parked_at_the_tenth_attempt(
    lite: Deployment, bank: Scripted, error: TollhouseError
) -> None:
    receive(lite, "e1")
    for attempt in range(1, 11):
        bank.plan = [error]
        result = apply(lite, bank)
        assert result == (Applied(0, 0, 1) if attempt == 10 else Applied(0, 1, 0))
        found = event(lite, "e1")
        assert found.attempts == attempt
        assert found.last_error == str(error)[:500]
        if attempt < 10:
            pause = timedelta(seconds=leases.pause_s("e1", attempt))
            assert (found.next_at, found.parked) == (lite.clock.now() + pause, None)
            lite.clock.set(found.next_at)
    assert event(lite, "e1").parked == str(error)[:500]
    with lite.database.transaction() as session:
        released = inbox.release(session, "stripe", "e1", lite.clock.now())
        assert (released.parked, released.attempts) == (None, 0)
        assert released.next_at == lite.clock.now()
        with pytest.raises(NotFound, match="No event 'e1' is parked"):
            inbox.release(session, "stripe", "e1", lite.clock.now())


def test_what_is_refused_or_not_supported_is_parked_at_once(
    lite: Deployment, bank: Scripted
) -> None:
    receive(lite, "e1")
    receive(lite, "e2", "weather", "x")
    receive(lite, "e3", "method", "")
    bank.plan = [Gone("no such payment")]
    assert apply(lite, bank) == Applied(1, 0, 2)
    assert event(lite, "e1").parked == "no such payment"
    assert event(lite, "e2").parked == "Events of kind 'weather' are not supported."
    assert event(lite, "e3").last_error == "not ours: payment method without a customer"
    with lite.database.transaction() as session:
        inbox.dismiss(session, "stripe", "e1", "ann", START)
    found = event(lite, "e1")
    assert (found.parked, found.done_at) == (None, START)
    assert found.last_error == "dismissed by ann: no such payment"


def test_three_unanswered_fetches_end_a_run(lite: Deployment, bank: Scripted) -> None:
    for number in range(5):
        receive(lite, f"e{number}", "payment", f"pi_{number}")
    bank.plan = [TryLater("away")] * 5
    assert apply(lite, bank) == Applied(0, 3, 0)
    assert len(bank.asked) == 3
