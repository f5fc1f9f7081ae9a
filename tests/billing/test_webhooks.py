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

from billing import outbox, settlement, webhooks
from core.errors import BadRequest, NotFound
from core.tenants import audit
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import House

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


def added(house: House, url: str, *events: str) -> tuple[str, str]:
    with house.database.transaction() as session:
        made = webhooks.add(session, ACME, house.clock, url, events)
        return made.id, made.secret


def told(house: House, event: str, dedupe: str = "cause") -> int:
    cause = webhooks.Cause("acme", event, "Something happened", dedupe, {"number": 7})
    with house.database.transaction() as session:
        return webhooks.tell(session, [cause], house.clock.now())


def deliver(house: House) -> int:
    sender = outbox.NetworkSender("", networks=("127.0.0.0/8",))
    return outbox.deliver(house.database, house.clock, sender)


def test_a_message_is_signed_over_its_id_its_time_and_its_body(
    house: House, receiver: Receiver
) -> None:
    _, secret = added(house, receiver.url)
    assert told(house, "invoice.final") == 1
    assert told(house, "invoice.final") == 0  # the same cause
    assert deliver(house) == 1
    ((headers, body),) = receiver.heard
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    wanted = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{wanted}"
    assert json.loads(body) == {"event": "invoice.final", "number": 7}


def test_an_endpoint_hears_what_it_asked_for_and_nothing_of_others(house: House) -> None:
    house.tenant("other")
    added(house, "https://one.example/hook", "payment.failed")
    added(house, "https://all.example/hook")
    with house.database.transaction() as session:
        webhooks.add(session, OTHER, house.clock, "https://other.example/hook")
    assert told(house, "payment.failed") == 2
    assert told(house, "payment.succeeded") == 1
    with house.database.read() as session:
        assert webhooks.deliveries(session, OTHER) == []
        targets = {each.target for each in webhooks.deliveries(session, ACME)}
    assert targets == {"https://one.example/hook", "https://all.example/hook"}


def test_a_payment_tells_its_outcome_once(house: House) -> None:
    added(house, "https://all.example/hook")
    now = house.clock.now()
    with house.database.transaction() as session:
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


def test_what_failed_for_good_goes_out_again_when_asked(house: House, receiver: Receiver) -> None:
    endpoint, _ = added(house, receiver.url)
    with house.database.transaction() as session:
        webhooks.test(session, ACME, house.clock, endpoint)
    receiver.status = 500
    for _ in range(outbox.MOST_ATTEMPTS):
        deliver(house)
        house.clock.advance(hours=2)
    with house.database.transaction() as session:
        (message,) = webhooks.deliveries(session, ACME)
        assert message.failed and "500" in (message.last_error or "")
        with pytest.raises(NotFound):
            webhooks.send_again(session, OTHER, house.clock, message.id)
        webhooks.send_again(session, ACME, house.clock, message.id)
    receiver.status = 200
    assert deliver(house) == 1
    ids = {headers["webhook-id"] for headers, _ in receiver.heard}
    assert len(ids) == 1 and len(receiver.heard) == outbox.MOST_ATTEMPTS + 1


def test_a_removed_endpoint_hears_nothing_more_and_the_log_says_who(house: House) -> None:
    endpoint, secret = added(house, "https://all.example/hook")
    told(house, "export.done")
    with house.database.transaction() as session:
        with pytest.raises(NotFound):
            webhooks.remove(session, OTHER, house.clock, endpoint)
        webhooks.remove(session, ACME, house.clock, endpoint)
    assert told(house, "export.done", "later") == 0
    with house.database.read() as session:
        (message,) = webhooks.deliveries(session, ACME)
        assert message.failed and message.last_error == "the endpoint was removed"
        log = audit.entries(session, ACME)
    assert [each.action for each in log] == ["webhook.remove", "webhook.add"]
    assert secret not in str([(each.before, each.after) for each in log])


@pytest.mark.parametrize(
    ("url", "events"),
    [("ftp://x.example", ()), ("https://u:p@x.example", ()), ("https://x.example", ("invoice",))],
)
def test_what_cannot_be_told_is_refused(house: House, url: str, events: tuple[str, ...]) -> None:
    with house.database.transaction() as session, pytest.raises(BadRequest):
        webhooks.add(session, ACME, house.clock, url, events)
