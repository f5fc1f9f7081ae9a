"""`tollhouse payment`, the doctor and the admin routes of payments, against the fake Stripe."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from billing.payments.fake_stripe.customers import leave_card
from billing.payments.fake_stripe.server import FakeStripe
from core.clock import FakeClock, SystemClock
from core.database import Database
from core.settings import Settings
from gateway.cli.doctor import dependencies
from gateway.cli.doctor.check import Health, run_checks
from gateway.cli.main import main
from tests.billing.conftest import deployment_of
from tests.billing.payments.stripe_deployment import SECRET, Till, open_till
from tests.gateway.deployment import running_deployment


@pytest.fixture
def till(sqlite_database: Database) -> Iterator[Till]:
    with open_till(deployment_of(sqlite_database, FakeClock())) as made:
        yield made


@pytest.fixture
def shop(till: Till, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Till:
    till.deployment.clock.set(SystemClock().now())  # commands know no other
    for name, value in (
        ("DATABASE_URL", till.deployment.database.url),
        ("DATA_DIR", str(tmp_path)),
        ("STRIPE_API_KEY", till.stripe.api_key),
        ("STRIPE_API_BASE", till.stripe.url),
        ("STRIPE_WEBHOOK_SECRET", SECRET),
    ):
        monkeypatch.setenv(f"TOLLHOUSE_{name}", value)
    return till


def call(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_from_the_setup_link_to_a_refund(shop: Till, capsys: pytest.CaptureFixture[str]) -> None:
    shop.invoice(12)
    shop.deployment.clock.set(SystemClock().now())
    made = call(capsys, "payment", "setup", "--tenant", "acme", "--return-url", "https://a.invalid")
    assert httpx.post(made["url"], data={"card": "4242"}).status_code == 303
    words = ("payment", "setup", "--tenant", "acme", "--portal")
    assert "/portal/cus_" in call(capsys, *words)["url"]
    shop.bring()
    told = call(capsys, "payment", "sync")
    assert (told["events_applied"], told["refused"]) == (3, 0)
    assert call(capsys, "payment", "sync")["commands_sent"] == 2  # the invoice, then its collection
    (paid,) = call(capsys, "payment", "list", "--tenant", "acme")
    assert (paid["status"], paid["amount"]["text"]) == ("succeeded", "12.00")
    words = ("payment", "refund", paid["id"], "--amount", "2.50", "--reference", "goodwill")
    first, again = call(capsys, *words), call(capsys, *words)
    assert first["id"] == again["id"] and first["status"] == "pending"
    assert [each["state"] for each in call(capsys, "payment", "outbox")] == ["waiting"]
    call(capsys, "payment", "sync")
    assert call(capsys, "payment", "outbox") == []
    assert shop.stripe.books.all("refund")[0]["amount"] == 250
    call(capsys, "audit", code=0)
    audit = call(capsys, "audit")
    assert audit["steps"]["stripe payments"] == {"count": 1, "units": 12 * 10**12}
    assert main(["payment", "list"]) == 0 and main(["payment", "outbox", "--all"]) == 0


def test_parked_events_are_listed_tried_again_and_dismissed(
    shop: Till, capsys: pytest.CaptureFixture[str]
) -> None:
    event = shop.stripe.books.emit("galaxy.exploded", {"object": "galaxy", "id": "gal_1"})
    shop.bring()
    (parked,) = call(capsys, "payment", "events")
    assert parked["state"] == "parked" and "galaxy.exploded" in parked["reason"]
    settings = Settings(
        database_url=shop.deployment.database.url, stripe_api_key="sk", stripe_webhook_secret="x"
    )
    finding = dependencies.queue(settings, SystemClock())
    assert finding.health is Health.WARN and "galaxy.exploded" in finding.says
    assert call(capsys, "payment", "retry", event["id"])["state"] == "waiting"
    call(capsys, "payment", "sync", code=1)
    assert call(capsys, "payment", "dismiss", event["id"])["state"] == "done"
    assert call(capsys, "payment", "events") == []
    assert dependencies.queue(settings, SystemClock()).health is Health.GOOD
    assert main(["payment", "dismiss", "evt_none"]) == 2


def test_a_refused_command_is_told_by_doctor_and_tried_again(
    shop: Till, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.collect_by_stripe()
    invoice = shop.invoice(12)
    shop.deployment.clock.set(SystemClock().now())
    customer = shop.customer()
    # Somebody gave our key to another request.
    headers = {
        "idempotency-key": f"invoice:{invoice.id}:invoice",
        "authorization": f"Bearer {shop.stripe.api_key}",
    }
    httpx.post(f"{shop.stripe.url}/v1/customers", headers=headers, data={"name": "x"})
    assert call(capsys, "payment", "sync", code=1)["refused"] == 1
    (refused,) = call(capsys, "payment", "outbox")
    assert refused["state"] == "refused" and "a different request" in refused["last_error"]
    assert "was rejected" in " ".join(
        each["message"] for each in call(capsys, "audit", code=1)["differences"]
    )
    shop.stripe.forget_keys()
    assert call(capsys, "payment", "retry", refused["key"])["state"] == "waiting"
    call(capsys, "payment", "sync")
    assert len(shop.stripe.books.all("invoice", customer=customer)) == 1


def test_without_stripe_the_commands_say_how_to_set_it_up(
    shop: Till, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOLLHOUSE_STRIPE_API_KEY", "")
    for words in (["setup", "--tenant", "acme"], ["sync"]):
        assert main(["payment", *words]) == 2
        assert "TOLLHOUSE_STRIPE_API_KEY" in capsys.readouterr().err
    assert main(["payment", "dunning"]) == 0


def test_a_stripe_that_does_not_answer_fails_the_audit_by_name(
    shop: Till, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOLLHOUSE_STRIPE_API_BASE", "http://127.0.0.1:9")
    assert main(["audit"]) == 1
    assert "--no-provider" in capsys.readouterr().err
    assert main(["audit", "--no-provider"]) == 0


@pytest.mark.parametrize("base", ["nonsense", "ftp://stripe"])
def test_a_broken_api_base_stops_the_command_and_is_told_by_doctor(
    shop: Till, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], base: str
) -> None:
    monkeypatch.setenv("TOLLHOUSE_STRIPE_API_BASE", base)
    assert main(["payment", "sync"]) == 2
    assert "TOLLHOUSE_STRIPE_API_BASE" in capsys.readouterr().err
    wrong = Settings(stripe_api_key="sk_test_x", stripe_api_base=base)
    (report,) = run_checks({"payments": dependencies.payments}, wrong, SystemClock())
    assert report.finding.health is Health.BAD
    assert "TOLLHOUSE_STRIPE_API_BASE" in report.finding.says


def test_a_tenant_leaves_a_card_by_the_admin_route(tmp_path: Path) -> None:
    with FakeStripe() as stripe:
        settings = {
            "stripe_api_key": stripe.api_key,
            "stripe_api_base": stripe.url,
            "stripe_webhook_secret": SECRET,
        }
        with (
            running_deployment(tmp_path, settings=settings) as deployment,
            httpx.Client(base_url=deployment.url, headers=deployment.headers, timeout=60) as client,
        ):
            path = "/admin/v1/payment-methods"
            made = client.post(f"{path}/setup", json={"return_url": "https://acme.invalid"})
            assert made.status_code == 200 and made.json()["url"].startswith(stripe.url)
            wrong = client.post(f"{path}/setup", json={"return_url": "javascript:alert(1)"})
            assert wrong.status_code == 400
            assert client.get(path).json()["data"] == []
            assert client.get("/admin/v1/payments").json()["data"] == []
            (customer,) = stripe.books.all("customer")
            leave_card(stripe.books, customer["id"])
            stripe.faults.rate = 1.0
            assert client.post(f"{path}/setup").status_code == 503
