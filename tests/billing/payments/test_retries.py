"""How long what failed waits: the bounds of each pause are written out by hand."""

from datetime import timedelta

import pytest
from sqlalchemy import select

from billing.notices import outbox, webhooks
from billing.notices.tables import OutboxMessage
from billing.payments import leases
from core.errors import NotFound
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import Deployment

ACME = scope_of_operator("acme")


@pytest.mark.parametrize(
    ("attempts", "seconds"),
    [(1, 5), (2, 10), (3, 20), (9, 1_280), (10, 2_560), (11, 3_600), (60, 3_600), (5_000, 3_600)],
)
def test_a_command_to_a_provider_waits_twice_as_long_each_time_up_to_an_hour(
    attempts: int, seconds: int
) -> None:
    pauses = [leases.pause_s(f"charge:{n}", attempts) for n in range(300)]
    assert 0.75 * seconds <= min(pauses) < 0.80 * seconds
    assert 1.20 * seconds < max(pauses) < 1.25 * seconds
    assert pauses == [leases.pause_s(f"charge:{n}", attempts) for n in range(300)]


class Away:
    def send(self, message: OutboxMessage) -> None:
        raise ConnectionError("nobody answers")


def test_a_message_waits_twice_as_long_each_time_and_is_given_up(lite: Deployment) -> None:
    now = lite.clock.now()
    with lite.database.transaction() as session:
        webhooks.add(session, ACME, lite.clock, "https://all.example/hook")
        cause = webhooks.Notification("acme", "invoice.final", "An invoice", "cause", {})
        webhooks.notify(session, [cause], now)
    for attempt, seconds in enumerate((5, 10, 20, 40, 80, 160, 320, 640, 1_280, 2_560, 3_600), 1):
        assert outbox.deliver(lite.database, lite.clock, Away()) == 0
        assert outbox.deliver(lite.database, lite.clock, Away()) == 0, "not before its time"
        with lite.database.read() as session:
            message = session.scalars(select(OutboxMessage)).one()
        assert (message.attempts, message.failed) == (attempt, False)
        assert message.last_error == "ConnectionError: nobody answers"
        pause = message.next_at - lite.clock.now()
        assert timedelta(seconds=seconds / 2) <= pause <= timedelta(seconds=seconds)
        lite.clock.set(message.next_at)
    with lite.database.transaction() as session:
        with pytest.raises(NotFound, match="no failed message"):  # it has not failed yet
            webhooks.send_again(session, ACME, lite.clock, message.id)
        with pytest.raises(NotFound, match="no failed message"):
            webhooks.send_again(session, ACME, lite.clock, message.id + 1)
    assert outbox.deliver(lite.database, lite.clock, Away()) == 0
    with lite.database.read() as session:
        message = session.scalars(select(OutboxMessage)).one()
    assert (message.attempts, message.failed, message.done_at) == (12, True, lite.clock.now())
