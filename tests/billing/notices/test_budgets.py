"""Budgets and wallets as the limiter sees them, and alerts that go out once."""

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from sqlalchemy import select

from billing.accounts.accounts import lock_account
from billing.ledger import credits, expiry
from billing.notices import budgets, outbox
from billing.notices.tables import Budget, OutboxMessage
from billing.pricing.prices import load_price_book
from billing.rating.unrated import UnratedUsage
from core.errors import BadRequest
from core.money import Money
from tests.billing.conftest import Deployment
from tests.billing.notices.mailbox import Mailbox

DOLLAR = 10**12


def limits(deployment: Deployment, **scope: str) -> dict[str, budgets.MoneyLimit]:
    wanted = {"project_id": "proj", "key_id": "key", **scope}
    unrated = UnratedUsage()
    with deployment.database.snapshot() as session:
        unrated.refresh(session, frozenset(("acme",)), load_price_book(session))
        at = deployment.clock.now()
        found = budgets.LimitReader(session, at, unrated).of_key("acme", **wanted)
    return {each.key.split("_")[0].split(":")[0]: each for each in found}


def make(deployment: Deployment, **fields: object) -> str:
    with deployment.database.transaction() as session:
        plain = {"tenant_id": "acme", "scope": "tenant", "scope_id": "acme", "cap": Money(DOLLAR)}
        return budgets.create(session, deployment.clock, **{**plain, **fields}).id  # type: ignore[arg-type]


def test_a_budget_counts_its_scope_and_its_window_only(deployment: Deployment) -> None:
    make(deployment, scope="project", scope_id="proj", window="day")
    spend = 50 * 600_000 + 80 * 150_000 + 20 * 75_000
    deployment.record(deployment.event(), deployment.event(project_id="other"))
    deployment.rate()
    (limit,) = limits(deployment).values()
    assert (limit.cap_units, limit.spent_units) == (DOLLAR, spend)
    assert limits(deployment, project_id="other") == {}
    deployment.clock.advance(days=1)
    (tomorrow,) = limits(deployment).values()
    assert tomorrow.spent_units == 0
    assert tomorrow.key != limit.key


def test_limits_that_hold_money_are_hard_and_hold_from_the_moment_they_are_made(
    lite: Deployment,
) -> None:
    hard, later = make(lite, window="day"), lite.clock.now() + timedelta(hours=1)
    make(lite, hard=False, window="month")
    with lite.database.read() as session:
        found = budgets.hard_limit_keys(session, lite.clock.now())
        assert [key.split(":")[0] for key in found["acme"]] == [hard]
        before = lite.clock.now() - timedelta(seconds=1)
        assert budgets.hard_limit_keys(session, before) == {}
        assert budgets.hard_limit_keys(session, later).keys() == {"acme"}


def test_windows_follow_the_zone_through_a_clock_change() -> None:
    at = datetime(2026, 3, 29, 12, tzinfo=UTC)  # clocks go forward in Berlin
    day = budgets.window_of("day", at, "Europe/Berlin")
    assert day.starts_at is not None and day.ends_at is not None
    start, end = day.starts_at.astimezone(UTC), day.ends_at.astimezone(UTC)
    assert end - start == timedelta(hours=23)
    assert budgets.window_of("week", at, "Europe/Berlin").name == "2026-03-23"
    assert budgets.window_of("month", at, "Europe/Berlin").name == "2026-03"
    assert budgets.window_of("total", at, "UTC").starts_at is None


def test_a_wallet_s_figures_only_rise(lite: Deployment) -> None:
    seen = []
    with lite.database.transaction() as session:
        lock_account(session, "acme").prepaid_only = True
    now = lite.clock.now()
    for step in range(4):
        with lite.database.transaction() as session:
            credits.grant(
                session,
                tenant_id="acme",
                kind="promo" if step % 2 else "prepaid",
                money=Money(100_000_000),
                reference=f"g{step}",
                at=now,
                expires_at=now + timedelta(days=step) if step % 2 else None,
            )
        lite.record(lite.event())
        lite.rate()
        seen.append(limits(lite)["wallet"])
        lite.clock.advance(days=1)
        seen.append(limits(lite)["wallet"])
        with lite.database.transaction() as session:
            expiry.expire(session, lite.clock.now())
        seen.append(limits(lite)["wallet"])
    for before, after in itertools.pairwise(seen):
        assert before.cap_units <= after.cap_units
        assert before.spent_units <= after.spent_units <= after.cap_units
    assert len({each.key for each in seen}) == 1


def test_a_wrong_budget_is_refused(lite: Deployment) -> None:
    for fields in ({"scope": "moon"}, {"cap": Money(0)}, {"cap": Money(1, "EUR")}):
        with pytest.raises(BadRequest):
            make(lite, **fields)


def test_an_alert_goes_out_once_a_threshold_and_window(
    lite: Deployment, hook: tuple[str, list[dict[str, object]]]
) -> None:
    url, received = hook
    mailbox = Mailbox()
    make(lite, cap=Money(50_000_000), webhooks=(url,), emails=("boss@example.com",))
    sender = outbox.NetworkSender(mailbox.url, networks=("127.0.0.0/8",))

    def _round() -> int:
        with lite.database.transaction() as session:
            budgets.send_alerts(session, lite.clock)
        return outbox.deliver(lite.database, lite.clock, sender)

    try:
        assert _round() == 0
        lite.record(lite.event())  # 43.5 of 50: above 50 and 80 percent
        lite.rate()
        assert _round() == 2, "of two that are reached at once, the higher one"
        assert _round() == 0
        lite.record(lite.event())
        lite.rate()
        assert _round() == 2
    finally:
        mailbox.close()
    assert [each["threshold_percent"] for each in received] == [80, 100]
    first, _ = mailbox.mails
    assert "boss@example.com" in first
    assert "Spent: 0.0000435 USD of 0.00005 USD" in first and "the organisation" in first
    assert "budget_id" not in first and "threshold_percent" not in first


def test_long_addresses_with_the_same_beginning_are_each_told(deployment: Deployment) -> None:
    """Their keys are of one length: PostgreSQL refuses a longer one."""
    urls = tuple(f"https://hooks.example.com/{'a' * 300}/{n}" for n in range(3))
    short = "https://hooks.example.com/b"
    with deployment.database.transaction() as session:
        queued = [
            outbox.put(
                session,
                tenant_id="acme",
                subject="s",
                payload={},
                dedupe="d" * 80,
                webhooks=(*urls, short),
                now=deployment.clock.now(),
            )
            for _ in range(2)
        ]
    assert queued == [4, 0]
    with deployment.database.read() as session:
        keys = session.scalars(select(OutboxMessage.dedupe)).all()
    assert sorted(map(len, keys)) == [81 + len(short), 200, 200, 200]


@pytest.mark.parametrize(
    ("threshold", "refused"), [(0, True), (1, False), (1000, False), (1001, True)]
)
def test_a_threshold_is_1_to_1000_percent(lite: Deployment, threshold: int, refused: bool) -> None:
    with pytest.raises(BadRequest, match="1 to 1000") if refused else nullcontext():
        make(lite, thresholds=(threshold,))


def test_what_cannot_be_sent_is_tried_again_and_given_up_on_the_record(lite: Deployment) -> None:
    make(lite, cap=Money(1), webhooks=("http://127.0.0.1:1/nobody",), thresholds=(100,))
    lite.record(lite.event())
    lite.rate()
    with lite.database.transaction() as session:
        assert budgets.send_alerts(session, lite.clock) == 1
    sender = outbox.NetworkSender("", networks=("127.0.0.0/8",))
    for _ in range(outbox.MAX_ATTEMPTS + 3):
        assert outbox.deliver(lite.database, lite.clock, sender) == 0
        lite.clock.advance(hours=1)
    with lite.database.read() as session:
        message = session.scalars(select(OutboxMessage)).one()
    assert (message.failed, message.attempts) == (True, outbox.MAX_ATTEMPTS)
    assert "refused" in (message.last_error or "")


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, object]]]]:
    received: list[dict[str, object]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(json.loads(body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", received
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("scope", [("tenant", "acme"), ("project", "proj"), ("key", "key")])
def test_usage_counts_before_it_is_rated_and_once(
    deployment: Deployment, scope: tuple[str, str]
) -> None:
    """A budget that is made on top of a backlog knows of it, batch by batch."""
    with deployment.database.transaction() as session:
        lock_account(session, "acme").prepaid_only = True
    make(deployment, scope=scope[0], scope_id=scope[1])
    each = 50 * 600_000 + 80 * 150_000 + 20 * 75_000
    for number in range(1, 4):
        deployment.record(deployment.event(), deployment.event(tenant_id="other"))
        found = limits(deployment)
        assert (found["bud"].spent_units, found["wallet"].spent_units) == (number * each,) * 2
    deployment.record(deployment.event(project_id="p2", key_id="k2", status=502))
    assert limits(deployment)["bud"].spent_units == (4 if scope[0] == "tenant" else 3) * each
    deployment.rate()
    assert limits(deployment)["bud"].spent_units == (4 if scope[0] == "tenant" else 3) * each
    deployment.clock.advance(days=31)
    assert limits(deployment)["bud"].spent_units == 0


@pytest.mark.parametrize(
    ("user", "logins"),
    [("", []), ("boss%40example.com:p%2Fw@", [("boss@example.com", "p/w")]), ("me@", [("me", "")])],
)
def test_the_mail_server_is_given_the_name_and_password_of_its_url(
    lite: Deployment, user: str, logins: list[tuple[str, str]]
) -> None:
    make(lite, cap=Money(1), emails=("boss@example.com",), thresholds=(100,))
    lite.record(lite.event())
    lite.rate()
    with lite.database.transaction() as session:
        assert budgets.send_alerts(session, lite.clock) == 1
    mailbox = Mailbox()
    try:
        sender = outbox.NetworkSender(mailbox.url.replace("//", f"//{user}"))
        assert outbox.deliver(lite.database, lite.clock, sender) == 1
    finally:
        mailbox.close()
    assert mailbox.logins == logins and len(mailbox.mails) == 1


def test_messages_to_a_budgets_own_webhook_are_signed(
    lite: Deployment, hook: tuple[str, list[dict[str, object]]]
) -> None:
    url, received = hook
    budget = make(lite, cap=Money(50_000_000), webhooks=(url, f"{url}/other"))
    lite.record(lite.event())
    lite.rate()
    sent: list[outbox.Outgoing] = []

    class _Recorder:
        def send(self, message: outbox.Outgoing) -> None:
            sent.append(message)

    with lite.database.transaction() as session:
        assert budgets.send_alerts(session, lite.clock) == 2
    assert outbox.deliver(lite.database, lite.clock, _Recorder()) == 2
    with lite.database.read() as session:
        secret = session.get_one(Budget, budget).webhook_secret
    assert secret is not None and secret.startswith("whsec_")
    assert [(each.secret, each.target) for each in sent] == [
        (secret, url),
        (secret, f"{url}/other"),
    ]
    assert received == []
