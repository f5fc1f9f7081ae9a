"""Webhooks: told once a cause and endpoint, signed so that anybody's library can check it, sent again
when asked, and a tenant's own alone.
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from sqlalchemy import select

from billing.notices import outbox, webhooks
from billing.payments import settlement
from core.errors import BadRequest, NotFound
from core.tenants import audit
from core.tenants.models import AuditEntry
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import Deployment

ACME, OTHER = scope_of_operator("acme"), scope_of_operator("other")


class Receiver:
    def __init__(self) -> None:
        self.heard: list[tuple[dict[str, str], bytes]] = []
        self.status = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.heard.append(({k.lower(): v for k, v in self.headers.items()}, body))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"
        Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def added(deployment: Deployment, url: str, *events: str) -> tuple[str, str]:
    with deployment.database.transaction() as session:
        made = webhooks.add(session, ACME, deployment.clock, url, events)
        return made.id, made.secret


def told(deployment: Deployment, event: str, dedupe: str = "cause") -> int:
    cause = webhooks.Notification("acme", event, "Something happened", dedupe, {"number": 7})
    with deployment.database.transaction() as session:
        return webhooks.notify(session, [cause], deployment.clock.now())


def deliver(deployment: Deployment) -> int:
    sender = outbox.NetworkSender("", networks=("127.0.0.0/8",))
    return outbox.deliver(deployment.database, deployment.clock, sender)


def test_the_audit_log_says_of_what_an_endpoint_hears(deployment: Deployment) -> None:
    added(deployment, "https://one.example/hook")
    added(deployment, "https://two.example/hook", "invoice.final")
    with deployment.database.read() as session:
        rows = session.scalars(select(AuditEntry).where(AuditEntry.action == "webhook.add"))
        shown = [row.after["events"] for row in rows.all() if row.after]
    assert sorted(shown) == [["all"], ["invoice.final"]]


def test_a_message_is_signed_over_its_id_its_time_and_its_body(
    deployment: Deployment, receiver: Receiver
) -> None:
    _, secret = added(deployment, receiver.url)
    assert told(deployment, "invoice.final") == 1
    assert told(deployment, "invoice.final") == 0  # the same cause
    assert deliver(deployment) == 1
    ((headers, body),) = receiver.heard
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    wanted = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{wanted}"
    assert json.loads(body) == {"event": "invoice.final", "number": 7}


def test_an_endpoint_hears_what_it_asked_for_and_nothing_of_others(deployment: Deployment) -> None:
    deployment.tenant("other")
    added(deployment, "https://one.example/hook", "payment.failed")
    added(deployment, "https://all.example/hook")
    with deployment.database.transaction() as session:
        webhooks.add(session, OTHER, deployment.clock, "https://other.example/hook")
    assert told(deployment, "payment.failed") == 2
    assert told(deployment, "payment.succeeded") == 1
    with deployment.database.read() as session:
        assert webhooks.deliveries(session, OTHER) == []
        targets = {each.target for each in webhooks.deliveries(session, ACME)}
    assert targets == {"https://one.example/hook", "https://all.example/hook"}


def test_a_payment_tells_its_outcome_once(deployment: Deployment) -> None:
    added(deployment, "https://all.example/hook")
    now = deployment.clock.now()
    with deployment.database.transaction() as session:
        payment = settlement.begin_payment(
            session,
            tenant_id="acme",
            invoice_id=None,
            amount_minor=1_250,
            currency="USD",
            provider="manual",
            reference="r1",
            at=now,
        )
        settlement.succeed(session, payment, now)
        settlement.succeed(session, payment, now)
        (message,) = webhooks.deliveries(session, ACME)
        assert message.payload["event"] == "payment.succeeded"
        assert message.payload["amount"] == "12.50"


def test_what_failed_for_good_goes_out_again_when_asked(
    deployment: Deployment, receiver: Receiver
) -> None:
    endpoint, _ = added(deployment, receiver.url)
    with deployment.database.transaction() as session:
        webhooks.test(session, ACME, deployment.clock, endpoint)
    receiver.status = 500
    for _ in range(outbox.MAX_ATTEMPTS):
        deliver(deployment)
        deployment.clock.advance(hours=2)
    with deployment.database.transaction() as session:
        (message,) = webhooks.deliveries(session, ACME)
        assert message.failed and "500" in (message.last_error or "")
        with pytest.raises(NotFound):
            webhooks.send_again(session, OTHER, deployment.clock, message.id)
        webhooks.send_again(session, ACME, deployment.clock, message.id)
    receiver.status = 200
    assert deliver(deployment) == 1
    ids = {headers["webhook-id"] for headers, _ in receiver.heard}
    assert len(ids) == 1 and len(receiver.heard) == outbox.MAX_ATTEMPTS + 1


def test_a_removed_endpoint_hears_nothing_more_and_the_log_says_who(deployment: Deployment) -> None:
    endpoint, secret = added(deployment, "https://all.example/hook")
    told(deployment, "export.done")
    with deployment.database.transaction() as session:
        with pytest.raises(NotFound):
            webhooks.remove(session, OTHER, deployment.clock, endpoint)
        webhooks.remove(session, ACME, deployment.clock, endpoint)
    assert told(deployment, "export.done", "later") == 0
    with deployment.database.read() as session:
        (message,) = webhooks.deliveries(session, ACME)
        assert message.failed and message.last_error == "the endpoint was removed"
        log = audit.entries(session, ACME)
    assert [each.action for each in log] == ["webhook.remove", "webhook.add"]
    assert secret not in str([(each.before, each.after) for each in log])


@pytest.mark.parametrize(
    ("url", "events"),
    [("ftp://x.example", ()), ("https://u:p@x.example", ()), ("https://x.example", ("invoice",))],
)
def test_what_cannot_be_told_is_refused(
    deployment: Deployment, url: str, events: tuple[str, ...]
) -> None:
    with deployment.database.transaction() as session, pytest.raises(BadRequest):
        webhooks.add(session, ACME, deployment.clock, url, events)


def test_a_secret_is_as_long_as_the_specification_asks_and_never_the_same(
    deployment: Deployment,
) -> None:
    made = [added(deployment, f"https://{n}.example/hook")[1] for n in range(5)]
    keys = {base64.b64decode(each.removeprefix("whsec_"), validate=True) for each in made}
    assert len(keys) == 5 and all(24 <= len(key) <= 64 for key in keys)
