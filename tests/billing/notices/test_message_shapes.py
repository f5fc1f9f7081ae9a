"""What Slack, Teams and PagerDuty get is what they document, and says what the mail says."""

from typing import Any

import pytest

from billing.notices import outbox, webhooks
from billing.notices.message_shapes import PAGERDUTY, SLACK, TEAMS, Shape
from core.clock import FakeClock
from core.database import Database
from core.errors import BadRequest
from core.tenants.organisations import create_tenant
from core.tenants.scope import scope_of_operator

BUDGET = {
    "event": "budget.threshold",
    "spent": "80",
    "cap": "100",
    "currency": "USD",
    "window": "2026-11",
    "hard": True,
    "scope": "tenant",
    "applies_to": "project <!channel> & co",
}
SAID = "Spent: 80 USD of 100 USD in 2026-11."


def test_plain_json_is_the_payload() -> None:
    assert Shape().body("Budget", BUDGET, "d") == BUDGET


def test_slack_gets_a_fallback_text_and_blocks_without_mentions() -> None:
    body = Shape(SLACK).body("Budget <b> at 80 %" + "x" * 200, BUDGET, "d")
    assert body["text"].startswith("Budget &lt;b&gt; at 80 %")
    header, section = body["blocks"]
    assert header["type"] == "header" and header["text"]["type"] == "plain_text"
    assert len(header["text"]["text"]) == 150
    assert section["type"] == "section" and SAID in section["text"]["text"]
    assert "&lt;!channel&gt; &amp; co" in section["text"]["text"]
    assert "<!" not in str(body)


def test_teams_gets_an_adaptive_card() -> None:
    (attached,) = Shape(TEAMS).body("Budget at 80 %", BUDGET, "d")["attachments"]
    assert attached["contentType"] == "application/vnd.microsoft.card.adaptive"
    card = attached["content"]
    assert (card["type"], card["version"]) == ("AdaptiveCard", "1.4")
    texts = [each["text"] for each in card["body"]]
    assert texts[0] == "Budget at 80 %" and SAID in texts


@pytest.mark.parametrize(
    ("event", "severity"),
    [("budget.threshold", "warning"), ("invoice.suspended", "critical"), ("webhook.test", "info")],
)
def test_pagerduty_gets_an_event_with_a_severity(event: str, severity: str) -> None:
    payload = (BUDGET if event == BUDGET["event"] else {}) | {"event": event}
    body = Shape(PAGERDUTY, "R0").body("s" * 2000, payload, "k" * 300)
    assert body["routing_key"] == "R0" and body["event_action"] == "trigger"
    assert len(body["dedup_key"]) == 255
    inner = body["payload"]
    assert (inner["severity"], inner["source"]) == (severity, "tollhouse")
    assert len(inner["summary"]) == 1024 and inner["custom_details"]["event"] == event


@pytest.mark.parametrize(
    "shape",
    [Shape("irc"), Shape(PAGERDUTY), Shape(SLACK, "key"), Shape(PAGERDUTY, "é"), Shape("otlp")],
)
def test_a_shape_that_is_none_is_refused(shape: Shape) -> None:
    with pytest.raises(BadRequest):
        shape.check()


def test_an_endpoint_sends_in_its_shape(database: Database, clock: FakeClock) -> None:
    sent: list[dict[str, Any]] = []

    class Kept:
        def send(self, message: outbox.Outgoing) -> None:
            sent.append(message.shape.body(message.subject, message.payload, message.dedupe))

    with database.transaction() as session:
        scope = scope_of_operator(create_tenant(session, clock, name="acme").id)
        for number, shape in enumerate((Shape(), Shape(SLACK), Shape(PAGERDUTY, "R0"))):
            url = f"https://hooks.example.com/{number}"
            made = webhooks.add(session, scope, clock, url, shape=shape)
            webhooks.test(session, scope, clock, made.id)
    assert outbox.deliver(database, clock, Kept()) == 3
    keys = {frozenset(each) & {"event", "blocks", "routing_key"} for each in sent}
    assert keys == {frozenset({"event"}), frozenset({"blocks"}), frozenset({"routing_key"})}
