"""Messages to tenants: queued once, tried at doubling pauses, and what their endpoints are asked."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.notices import outbox, webhooks
from billing.notices.outbox import Outgoing
from billing.notices.tables import OutboxMessage, WebhookEndpoint
from billing.notices.webhooks import Notification
from core.errors import BadRequest, Conflict, NotFound
from core.tenants.models import AuditEntry
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import START, Deployment

ACME, BIRCH = scope_of_operator("acme"), scope_of_operator("birch")


class Sender:
    """Fails as often as it is told, and notes what it was given."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.seen: list[str] = []

    def send(self, message: Outgoing) -> None:
        self.seen.append(message.target)
        if self.failures:
            self.failures -= 1
            raise ValueError("e" * 600)


def _put(session: Session, **fields: Any) -> int:
    given = {"tenant_id": "acme", "subject": "s", "payload": {"a": 1}, "dedupe": "d", "now": START}
    return outbox.put(session, **given | fields)


def _messages(session: Session) -> list[OutboxMessage]:
    return list(session.scalars(select(OutboxMessage).order_by(OutboxMessage.id)))


def _one(lite: Deployment) -> OutboxMessage:
    with lite.database.read() as session:
        (found,) = _messages(session)
        return found


def test_a_message_for_each_target_once(session: Session) -> None:
    targets = {"webhooks": ["u1"], "emails": ["m1"], "endpoints": [("hook", "u2")]}
    assert _put(session, subject="s" * 201, **targets) == 3
    assert _put(session, **targets) == 0
    found = _messages(session)
    assert [(m.channel, m.target, m.endpoint_id, m.dedupe) for m in found] == [
        ("webhook", "u1", None, "d:u1"),
        ("email", "m1", None, "d:m1"),
        ("webhook", "u2", "hook", "d:hook"),
    ]
    first = found[0]
    assert (first.tenant_id, first.subject, first.payload) == ("acme", "s" * 200, {"a": 1})
    assert (first.created_at, first.next_at, first.attempts) == (START, START, 0)
    assert (first.failed, first.done_at, first.last_error) == (False, None, None)


def test_long_targets_are_told_apart_by_their_ends(session: Session) -> None:
    whole = "u" * 198  # d: and this are as long as may be
    assert len(outbox._dedupe("d", whole)) == 200
    assert outbox._dedupe("d", whole) == f"d:{whole}"
    longer = [outbox._dedupe("d", whole + end) for end in "ab"]
    assert [len(each) for each in longer] == [200, 200] and longer[0] != longer[1]
    assert longer[0].startswith("d:" + "u" * 133 + ":")


def test_a_message_is_tried_twelve_times_at_doubling_pauses(lite: Deployment) -> None:
    with lite.database.transaction() as session:
        _put(session, webhooks=["u1"])
    sender = Sender(12)
    for attempt in range(1, 13):
        assert outbox.deliver(lite.database, lite.clock, sender) == 0
        assert outbox.deliver(lite.database, lite.clock, sender) == 0, "not before its time"
        found = _one(lite)
        assert (found.attempts, len(sender.seen)) == (attempt, attempt)
        assert found.last_error == ("ValueError: " + "e" * 600)[:500]
        if attempt < 12:
            assert (found.failed, found.done_at) == (False, None)
            pause = (found.next_at - lite.clock.now()).total_seconds()
            longest = min(3600.0, 5.0 * 2.0 ** (attempt - 1))
            assert longest / 2 <= pause <= longest
            lite.clock.set(found.next_at)
    found = _one(lite)
    assert (found.failed, found.done_at) == (True, lite.clock.now())
    lite.clock.advance(days=1)
    assert outbox.deliver(lite.database, lite.clock, sender) == 0 and len(sender.seen) == 12
    with lite.database.transaction() as session:
        webhooks.send_again(session, ACME, lite.clock, found.id)
    again = _one(lite)
    assert (again.failed, again.done_at, again.attempts) == (False, None, 0)
    assert again.next_at == lite.clock.now()
    assert outbox.deliver(lite.database, lite.clock, sender) == 1
    done = _one(lite)
    assert (done.done_at, done.last_error, done.attempts) == (lite.clock.now(), None, 1)
    with lite.database.transaction() as session:
        for scope, name in ((ACME, done.id), (BIRCH, done.id), (ACME, 99)):
            with pytest.raises(NotFound, match=f"There is no failed message {name}"):
                webhooks.send_again(session, scope, lite.clock, name)


def test_due_messages_go_out_oldest_first_up_to_a_number(lite: Deployment) -> None:
    with lite.database.transaction() as session:
        for target, late in (("b", 5), ("a", 5), ("first", 9), ("later", -1)):
            _put(session, webhooks=[target], now=START - timedelta(minutes=late))
    sender = Sender()
    assert outbox.deliver(lite.database, lite.clock, sender, limit=2) == 2
    assert sorted(sender.seen) == ["b", "first"]  # at the same time
    assert outbox.deliver(lite.database, lite.clock, sender) == 1
    assert sender.seen[2:] == ["a"]
    lite.clock.advance(minutes=1)
    assert outbox.deliver(lite.database, lite.clock, sender) == 1
    with lite.database.transaction() as session:
        _put(session, webhooks=[f"u{n}" for n in range(101)], dedupe="many")
    assert outbox.deliver(lite.database, lite.clock, sender) == 100


def _add(session: Session, lite: Deployment, url: str = "https://a.example", **fields: Any) -> Any:
    return webhooks.add(session, fields.pop("scope", ACME), lite.clock, url, **fields)


def _causes(*events: str, tenant: str = "acme") -> list[Notification]:
    return [Notification(tenant, event, f"about {event}", "x", {"n": 1}) for event in events]


def test_each_subscribed_endpoint_is_told_once(session: Session, lite: Deployment) -> None:
    every = _add(session, lite)
    some = _add(session, lite, "https://b.example", events=("payment.failed", "export.done"))
    gone = _add(session, lite, "https://c.example")
    webhooks.remove(session, ACME, lite.clock, gone.id)
    assert webhooks.notify(session, [], START) == 0
    assert webhooks.notify(session, _causes("invoice.final", "payment.failed"), START) == 3
    assert webhooks.notify(session, _causes("payment.failed"), START) == 0
    assert webhooks.notify(session, _causes("payment.failed", tenant="birch"), START) == 0
    found = [(m.endpoint_id, m.subject, m.payload, m.dedupe) for m in _messages(session)]
    final = {"event": "invoice.final", "n": 1}
    failed = {"event": "payment.failed", "n": 1}
    assert sorted(found) == sorted(
        [
            (every.id, "about invoice.final", final, f"invoice.final:x:{every.id}"),
            (every.id, "about payment.failed", failed, f"payment.failed:x:{every.id}"),
            (some.id, "about payment.failed", failed, f"payment.failed:x:{some.id}"),
        ]
    )
    states = webhooks.last_states(session, ACME)
    assert {name: each.payload["event"] for name, each in states.items()} == {
        every.id: "payment.failed",
        some.id: "payment.failed",
    }
    assert webhooks.last_states(session, BIRCH) == {}


def test_what_is_kept_of_an_endpoint_and_logged(session: Session, lite: Deployment) -> None:
    made = _add(session, lite, events=("export.done",))
    assert (made.tenant_id, made.url, made.events) == ("acme", "https://a.example", ["export.done"])
    assert (made.created_at, made.ended_at) == (START, None)
    assert made.secret.startswith("whsec_") and len(made.secret) == 38
    webhooks.test(session, ACME, lite.clock, made.id)
    (message,) = _messages(session)
    told = {"event": "webhook.test", "tenant_id": "acme", "at": "2026-01-01T00:00:00+00:00"}
    assert (message.payload, message.subject, message.target) == (told, "Test message", made.url)
    lite.clock.advance(minutes=1)
    webhooks.remove(session, ACME, lite.clock, made.id)
    assert made.ended_at == lite.clock.now()
    gone = (message.failed, message.done_at, message.last_error)
    assert gone == (True, lite.clock.now(), "the endpoint was removed")
    session.flush()
    logged = session.scalars(select(AuditEntry).order_by(AuditEntry.id)).all()
    shown = {"url": "https://a.example", "events": ["export.done"]}
    assert [(each.action, each.target, each.before, each.after) for each in logged] == [
        ("webhook.add", made.id, None, shown),
        ("webhook.test", made.id, None, None),
        ("webhook.remove", made.id, shown, None),
    ]
    with pytest.raises(NotFound, match="There is no endpoint"):
        webhooks.send_again(session, ACME, lite.clock, message.id)
    for call in (webhooks.remove, webhooks.test):
        with pytest.raises(NotFound, match=f"There is no endpoint '{made.id}'"):
            call(session, ACME, lite.clock, made.id)


def test_a_resent_message_is_logged(session: Session, lite: Deployment) -> None:
    _put(session, webhooks=["u"])
    (message,) = _messages(session)
    message.failed = True
    webhooks.send_again(session, ACME, lite.clock, message.id)
    session.flush()
    logged = session.scalars(select(AuditEntry)).one()
    assert (logged.action, logged.target) == ("message.resend", str(message.id))


def test_a_tenant_has_twenty_endpoints_of_its_own_at_most(
    session: Session, lite: Deployment
) -> None:
    _add(session, lite, scope=BIRCH)
    made = [_add(session, lite) for _ in range(20)]
    with pytest.raises(Conflict, match="The tenant has 20 endpoints, the maximum"):
        _add(session, lite)
    webhooks.remove(session, ACME, lite.clock, made[0].id)
    last = _add(session, lite)
    assert [each.id for each in webhooks.of_tenant(session, ACME)] == [
        *sorted(each.id for each in made[1:]),
        last.id,
    ]
    with pytest.raises(NotFound):
        webhooks.get(session, BIRCH, last.id)
    with pytest.raises(NotFound, match=f"There is no endpoint '{'e' * 40}'"):
        webhooks.get(session, ACME, "e" * 50)


def test_an_unknown_event_is_named_and_an_address_is_checked(
    session: Session, lite: Deployment
) -> None:
    with pytest.raises(BadRequest, match=f"There is no event '{'e' * 40}'") as told:
        _add(session, lite, events=("invoice.final", "e" * 50))
    assert told.value.param == "events"
    made = _add(session, lite, "anything", events=("own",), known=("own",), check=lambda _: None)
    assert made.events == ["own"]
    with pytest.raises(BadRequest):
        _add(session, lite, "anything")
    assert session.scalars(select(WebhookEndpoint)).all() == [made]


def test_messages_are_listed_by_tenant_newest_first(session: Session) -> None:
    for number in range(102):
        _put(session, webhooks=["u"], dedupe=str(number))
    _put(session, webhooks=["u"], dedupe="theirs", tenant_id="birch")
    ids = [each.id for each in webhooks.deliveries(session, ACME)]
    assert ids == list(range(102, 2, -1))
    assert [m.id for m in webhooks.deliveries(session, ACME, before_id=3, limit=1)] == [2]
    assert [m.id for m in webhooks.deliveries(session, BIRCH)] == [103]
