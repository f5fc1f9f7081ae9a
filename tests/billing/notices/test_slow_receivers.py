"""A receiver that never ends its answer delays its own tenant only, and holds no lock."""

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from sqlalchemy import select

from billing.notices import outbox, webhooks
from billing.notices.outbox import Outgoing
from billing.notices.tables import OutboxMessage
from core.errors import Unavailable
from core.outbound import post_json
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import START, Deployment
from tests.billing.notices.mailbox import Mailbox
from tests.slow_server import SlowServer

LOCAL = ("127.0.0.0/8",)


class Held:
    """Answers of targets that begin with `slow` wait until the test lets them go."""

    def __init__(self) -> None:
        self.let_go, self.held = threading.Event(), threading.Semaphore(0)
        self.sent: list[str] = []
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()
        self.others = threading.Semaphore(0)

    def send(self, message: Outgoing) -> None:
        if not message.target.startswith("slow"):
            self.sent.append(message.target)
            self.others.release()
            return
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self.held.release()
        assert self.let_go.wait(60)
        with self._lock:
            self._now -= 1


def put(deployment: Deployment, tenant: str, *targets: str, late_s: float = 0) -> None:
    with deployment.database.transaction() as session:
        for number, target in enumerate(targets):
            outbox.put(
                session,
                tenant_id=tenant,
                subject="s",
                payload={},
                dedupe=f"{tenant}{number}",
                webhooks=[target],
                now=START - timedelta(seconds=late_s),
            )


@pytest.fixture
def slow() -> Iterator[SlowServer]:
    server = SlowServer()
    yield server
    server.close()


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    made = Mailbox()
    yield made
    made.close()


def test_messages_of_others_leave_and_rows_are_written_while_a_tenants_receivers_hang(
    deployment: Deployment,
) -> None:
    """The hostile tenant's messages are older than the victim's, and more than are sent at once."""
    deployment.tenant("victim")
    sender = Held()
    hostile = [f"slow-{number}" for number in range(3 * outbox.TOGETHER)]
    put(deployment, "acme", *hostile, late_s=60)
    put(deployment, "victim", "a", "b", "c")
    run = threading.Thread(
        target=outbox.deliver, args=(deployment.database, deployment.clock, sender)
    )
    run.start()
    try:
        for _ in range(outbox.OF_A_TENANT):
            assert sender.held.acquire(timeout=60)
        for _ in range(3):
            assert sender.others.acquire(timeout=60)
        # Neither locked nor waiting for it: another transaction writes while they hang.
        put(deployment, "victim", "later", "later still")
        assert sender.others.acquire(timeout=60) and sorted(sender.sent)[:3] == ["a", "b", "c"]
    finally:
        sender.let_go.set()
        run.join(60)
    assert sender.most == outbox.OF_A_TENANT


def test_the_share_of_a_tenant_is_one_over_all_processes(deployment: Deployment) -> None:
    deployment.tenant("victim")
    put(deployment, "acme", *(f"slow-{number}" for number in range(10)), late_s=60)
    put(deployment, "victim", "a", "slow-0")
    runs = [outbox._claim(deployment.database, deployment.clock, 100) for _ in range(3)]
    claimed = [[(each.tenant_id, each.target) for each in run] for run in runs]
    first = [("acme", f"slow-{number}") for number in range(outbox.OF_A_TENANT)]
    assert claimed == [[*first, ("victim", "a")], [], []]


def test_one_target_gets_one_message_at_a_time(deployment: Deployment) -> None:
    sender = Held()
    sender.let_go.set()
    put(deployment, "acme", "slow", "slow", "slow")
    assert outbox.deliver(deployment.database, deployment.clock, sender) == 3
    assert sender.most == 1


def test_a_claim_is_a_lease_that_ends_when_its_process_died(lite: Deployment) -> None:
    class Dying:
        def send(self, message: Outgoing) -> None:
            raise AssertionError("not reached")

    put(lite, "acme", "a")
    # As a process that is killed between the claim and the record leaves it.
    (claimed,) = outbox._claim(lite.database, lite.clock, 1)
    assert outbox.deliver(lite.database, lite.clock, Dying()) == 0, "it is claimed"
    lite.clock.advance(seconds=outbox.LEASE_S)
    sender = Held()
    assert outbox.deliver(lite.database, lite.clock, sender) == 1 and sender.sent == ["a"]
    # The first process lives after all: its outcome is no longer the message's.
    assert outbox._record(lite.database, lite.clock, claimed, OSError("late")) == 0
    with lite.database.read() as session:
        message = session.scalars(select(OutboxMessage)).one()
        assert (message.attempts, message.failed, message.last_error) == (2, False, None)


def test_an_endpoint_that_is_removed_while_its_message_is_sent_stays_removed(
    lite: Deployment,
) -> None:
    scope = scope_of_operator("acme")
    with lite.database.transaction() as session:
        endpoint = webhooks.add(session, scope, lite.clock, "https://a.example").id
        webhooks.test(session, scope, lite.clock, endpoint)
    (claimed,) = outbox._claim(lite.database, lite.clock, 1)
    with lite.database.transaction() as session:
        webhooks.remove(session, scope, lite.clock, endpoint)
    assert outbox._record(lite.database, lite.clock, claimed, None) == 0
    with lite.database.read() as session:
        assert session.scalars(select(OutboxMessage)).one().last_error == "the endpoint was removed"


@pytest.mark.parametrize("beginning", [b"", b"HTTP/1.1 2", b"HTTP/1.1 200 OK\r\nx: "])
def test_the_time_of_an_exchange_is_limited_in_total(beginning: bytes) -> None:
    """Each byte comes long before a time-out of one read."""
    server = SlowServer(beginning, every_s=0.1)
    try:
        with pytest.raises(Unavailable, match="no complete response in 1 s"):
            post_json(server.url, {}, {}, timeout_s=1, private=LOCAL)
        assert not beginning or server.ended.acquire(timeout=60)
    finally:
        server.close()


def test_a_mail_server_that_never_ends_its_greeting_delays_one_mail(
    mailbox: Mailbox,
) -> None:
    server = SlowServer(b"220 ", every_s=0.1)
    try:
        sender = outbox.NetworkSender(f"smtp://127.0.0.1:{server.port}", timeout_s=1)
        message = Outgoing(1, "acme", "email", "a@b.example", "s", {}, "d", 1)
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1 took no mail in 1 s"):
            sender.send(message)
    finally:
        server.close()
    outbox.NetworkSender(mailbox.url).send(message)
    assert len(mailbox.mails) == 1


def test_nothing_is_sent_inside_a_transaction(lite: Deployment, slow: SlowServer) -> None:
    """For every caller, whichever comes next."""
    mail = Outgoing(1, None, "email", "a@b.example", "s", {}, "d", 1)
    with lite.database.transaction():
        with pytest.raises(RuntimeError, match="an HTTP request inside a transaction"):
            post_json(slow.url, {}, {}, timeout_s=1, private=LOCAL)
        with pytest.raises(RuntimeError, match="a mail inside a transaction"):
            outbox.NetworkSender("smtp://127.0.0.1:1").send(mail)
    assert not slow.asked.acquire(blocking=False)
