"""Stripe's events over HTTP: signed ones are kept once, others are refused with the reason."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from billing.payments.base import PaymentProvider
from billing.payments.fake_stripe.customers import leave_card
from billing.payments.fake_stripe.server import FakeStripe
from billing.payments.fake_stripe.webhooks import post, signed
from billing.payments.push import customer_of
from billing.payments.tables import PaymentWebhook
from core.queue import TASKS, TaskContext
from tests.gateway.deployment import Deployment, running_deployment

SECRET = "whsec_test"


@pytest.fixture(scope="module")
def stripe() -> Iterator[FakeStripe]:
    with FakeStripe() as made:
        yield made


@pytest.fixture(scope="module")
def deployment(
    tmp_path_factory: pytest.TempPathFactory, stripe: FakeStripe
) -> Iterator[Deployment]:
    settings = {
        "stripe_api_key": stripe.api_key,
        "stripe_api_base": stripe.url,
        "stripe_webhook_secret": SECRET,
    }
    with running_deployment(tmp_path_factory.mktemp("stripe"), settings=settings) as made:
        yield made


def _kept(deployment: Deployment, name: str) -> list[PaymentWebhook]:
    with deployment.services.database.read() as session:
        query = select(PaymentWebhook).where(PaymentWebhook.external_id == name)
        return list(session.scalars(query))


def _event(stripe: FakeStripe, kind: str = "invoice.paid") -> dict[str, Any]:
    return stripe.books.emit(kind, {"object": "invoice", "id": "in_1", "note": "Zoë pays 5 €"})


def test_a_signed_event_is_kept_once(deployment: Deployment, stripe: FakeStripe) -> None:
    event = _event(stripe)
    url = f"{deployment.url}/webhooks/stripe"
    threads = [threading.Thread(target=post, args=(event, url, SECRET)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    body, signature = signed(event, SECRET)
    again = httpx.post(url, content=body, headers={"stripe-signature": signature})
    assert (again.status_code, again.json()) == (200, {"received": True, "new": False})
    (kept,) = _kept(deployment, event["id"])
    assert (kept.kind, kept.subject_id, kept.type) == ("invoice", "in_1", "invoice.paid")


def test_a_wrong_signature_is_refused_and_nothing_is_kept(
    deployment: Deployment, stripe: FakeStripe
) -> None:
    event = _event(stripe)
    body, signature = signed(event, "whsec_other")
    _, good = signed(event, SECRET)
    changed = body.replace(b"in_1", b"in_2")
    for content, header in ((body, signature), (changed, good), (body, None), (body, "t=1,v1=0")):
        headers = {"stripe-signature": header} if header else {}
        answer = httpx.post(f"{deployment.url}/webhooks/stripe", content=content, headers=headers)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "invalid_webhook" and "signature" in error["message"].lower()
    assert _kept(deployment, event["id"]) == []


def test_an_unknown_type_is_kept_and_parked(deployment: Deployment, stripe: FakeStripe) -> None:
    event = _event(stripe, "galaxy.exploded")
    assert post(event, f"{deployment.url}/webhooks/stripe", SECRET) == 200
    (kept,) = _kept(deployment, event["id"])
    assert kept.parked and "galaxy.exploded" in kept.parked


def test_an_event_is_a_megabyte_at_most(deployment: Deployment) -> None:
    answer = httpx.post(f"{deployment.url}/webhooks/stripe", content=b"x" * (2**20 + 1))
    assert answer.status_code == 413


def test_the_tasks_apply_what_came(deployment: Deployment, stripe: FakeStripe) -> None:
    services = deployment.services
    customer = customer_of(
        services.database, services.clock, services.payments, deployment.tenant_id
    )
    leave_card(stripe.books, customer)
    told = [
        e
        for e in stripe.books.events
        if e["type"] == "checkout.session.completed" or (e["type"] == "payment_method.attached")
    ]
    for event in told:
        assert post(event, f"{deployment.url}/webhooks/stripe", SECRET) == 200
    services_of_tasks: dict[type, object] = {PaymentProvider: services.payments}
    context = TaskContext(services.settings, services.database, services.clock, services_of_tasks)
    TASKS["billing.apply_webhooks"](context)  # or the gateway's own schedule was first
    account = httpx.get(f"{deployment.url}/admin/v1/billing", headers=deployment.headers).json()
    assert account["collection"] == "stripe"


def test_without_stripe_no_event_is_taken(tmp_path: Path) -> None:
    with running_deployment(tmp_path) as plain:
        answer = httpx.post(f"{plain.url}/webhooks/stripe", content=json.dumps({"id": "evt_1"}))
        assert answer.status_code == 400
        assert "TOLLHOUSE_STRIPE_API_KEY" in answer.json()["error"]["message"]


def test_gateways_and_workers_know_every_task_of_billing() -> None:
    for module in ("gateway.admin.worker.application", "gateway.tasks"):
        code = (
            f"import {module}; from core.queue import TASKS; "
            "print({'billing.rate_events', 'billing.push_payments', 'moderation.digest'} <= {*TASKS})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "True", module + done.stderr
