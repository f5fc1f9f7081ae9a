"""What tenants store: within the quota of their plan whatever the way in, counted as it lies in the
database, and each call that stores or computes is one of the requests that the plan allows.
"""

import uuid
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from core import storage
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import MODEL, Deployment

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
RESPONSE = {"model": MODEL, "input": "Hi", "max_output_tokens": 16}
KIB = "x" * 1024
PART = 200  # KiB that each act stores
LIMIT = {"scope": "tenant", "unit": "requests", "period_s": 86_400}


class Tenant:
    def __init__(self, deployment: Deployment, *, requests: int = 0, storage_mb: int = 1) -> None:
        self.deployment = deployment
        name = f"t{uuid.uuid4().hex[:8]}"
        rules = [LIMIT | {"limit": requests}] if requests else []
        plan = {"limits": rules, "storage_mb": storage_mb}
        token = deployment.services.operator_token
        self.key = token
        assert self.ask("PUT", f"/admin/v1/plans/{name}", json=plan).is_success
        made = self.ask("POST", "/admin/v1/tenants", json={"name": name, "plan": name})
        assert made.status_code == 201, made.text
        self.id = made.json()["id"]
        self.key = with_role(deployment, "owner", self.id)

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}", **more.pop("headers", {})}
        return httpx.request(
            method, f"{self.deployment.url}{path}", headers=headers, timeout=60, **more
        )

    def used(self) -> dict[str, int]:
        with self.deployment.services.database.read() as session:
            return storage.used(session, self.id)


def _item() -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": KIB * PART}


def _conversation(tenant: Tenant) -> httpx.Response:
    return tenant.ask("POST", "/v1/conversations", json={"items": [_item()]})


def _items(tenant: Tenant) -> httpx.Response:
    made = tenant.ask("POST", "/v1/conversations", json={})
    if not made.is_success:
        return made
    path = f"/v1/conversations/{made.json()['id']}/items"
    return tenant.ask("POST", path, json={"items": [_item()]})


def _metadata(tenant: Tenant) -> httpx.Response:
    """Small, but without an end."""
    labels = {f"{number}": "x" * 500 for number in range(16)}
    for _ in range(24):
        answer = tenant.ask("POST", "/v1/conversations", json={"metadata": labels})
        if not answer.is_success:
            return answer
    return answer


def _file(tenant: Tenant) -> httpx.Response:
    sent = {"file": ("a.jsonl", (KIB * PART).encode())}
    return tenant.ask("POST", "/v1/files", data={"purpose": "batch"}, files=sent)


def _message_batch(tenant: Tenant) -> httpx.Response:
    params = {**BODY, "messages": [{"role": "user", "content": KIB * PART}]}
    requests = [{"custom_id": "a", "params": params}]
    return tenant.ask("POST", "/v1/messages/batches", json={"requests": requests})


def _idempotent(tenant: Tenant) -> httpx.Response:
    """An answer that repeats much of its request: its log-probabilities."""
    body = {**BODY, "max_tokens": 400, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    return tenant.ask("POST", CHAT, json=body, headers={"idempotency-key": uuid.uuid4().hex})


WAYS_IN: tuple[Callable[[Tenant], httpx.Response], ...] = (
    _conversation,
    _items,
    _metadata,
    _file,
    _message_batch,
    _idempotent,
)


@pytest.mark.parametrize("act", WAYS_IN)
def test_no_way_in_passes_the_quota_and_others_store_on(
    deployment: Deployment, act: Callable[[Tenant], httpx.Response]
) -> None:
    hostile, victim = Tenant(deployment), Tenant(deployment)
    for _ in range(12):
        refused = act(hostile)
        if not refused.is_success:
            break
    error = refused.json()["error"]
    assert refused.status_code == 429, refused.text
    assert (
        error.get("code", "storage_quota_exceeded") == "storage_quota_exceeded"
    )  # Anthropic has none
    assert refused.headers["x-should-retry"] == "false" and "MiB of its plan" in error["message"]
    used = sum(hostile.used().values())
    # An answer that is stored under an Idempotency-Key was admitted before its size was known.
    beyond = 1 << 20 if act is _idempotent else 0
    assert 1 << 18 < used <= (1 << 20) + beyond
    assert act(victim).is_success
    shown = hostile.ask("GET", "/admin/v1/storage").json()
    assert (shown["quota_bytes"], shown["used_bytes"]) == (1 << 20, used)
    assert hostile.ask("POST", CHAT, json=BODY).is_success, "what stores nothing goes on"


def test_responses_are_refused_before_they_run_and_what_is_deleted_makes_room(
    deployment: Deployment,
) -> None:
    tenant = Tenant(deployment)
    made = []
    while (answer := _conversation(tenant)).is_success:
        made.append(answer.json()["id"])
    before = len(deployment.engine.submitted)
    large = RESPONSE | {"input": KIB * PART}
    refused = tenant.ask("POST", "/v1/responses", json=large)
    assert refused.json()["error"]["code"] == "storage_quota_exceeded", refused.text
    assert len(deployment.engine.submitted) == before
    assert tenant.ask("POST", "/v1/responses", json=RESPONSE | {"store": False}).is_success
    for each in made:
        assert tenant.ask("DELETE", f"/v1/conversations/{each}").is_success
    assert tenant.used()["conversations"] == 0
    assert tenant.ask("POST", "/v1/responses", json=RESPONSE).is_success
    assert 0 < tenant.used()["responses"] < 10_000


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_that_cannot_be_stored_is_refused_before_it_runs(
    deployment: Deployment, stream: bool
) -> None:
    tenant = Tenant(deployment)
    while _conversation(tenant).is_success:
        pass
    while _metadata(tenant).is_success:
        pass
    before = len(deployment.engine.submitted)
    labels = {f"{number}": "x" * 512 for number in range(16)}
    large = BODY | {"store": True, "stream": stream, "metadata": labels}
    refused = tenant.ask("POST", CHAT, json=large)
    assert refused.status_code == 429, refused.text
    assert refused.json()["error"]["code"] == "storage_quota_exceeded"
    assert len(deployment.engine.submitted) == before
    assert tenant.ask("POST", CHAT, json=BODY | {"stream": stream, "store": False}).is_success


def test_the_sizes_are_those_of_the_rows(deployment: Deployment) -> None:
    """By queries of the test's own, after each kind of change."""
    tenant = Tenant(deployment)
    made = tenant.ask("POST", "/v1/conversations", json={"metadata": {"a": "b"}}).json()["id"]
    path = f"/v1/conversations/{made}"
    first = tenant.ask("POST", f"{path}/items", json={"items": [_item()]}).json()["data"][0]["id"]
    tenant.ask("POST", f"{path}/items", json={"items": [_item()]})
    assert tenant.ask("DELETE", f"{path}/items/{first}").is_success
    assert tenant.ask("POST", path, json={"metadata": {"a": "b" * 300}}).is_success
    small = tenant.ask("POST", "/v1/conversations", json={}).json()["id"]
    answer = tenant.ask("POST", "/v1/responses", json=RESPONSE | {"conversation": small})
    assert answer.is_success, answer.text
    stored = tenant.ask("POST", CHAT, json=BODY | {"store": True, "metadata": {}}).json()["id"]
    changed = tenant.ask("POST", f"{CHAT}/{stored}", json={"metadata": {"c": "d" * 100}})
    assert changed.is_success, changed.text
    tenant.ask("POST", CHAT, json=BODY, headers={"idempotency-key": "k"})
    sizes = {
        "conversations": "select (select sum(length(sealed)) from conversations where tenant_id = :t)"
        " + (select sum(length(i.sealed)) from conversation_items i join conversations c"
        " on c.id = i.conversation_id where c.tenant_id = :t)",
        "responses": "select sum(length(sealed)) from stored_responses where tenant_id = :t",
        "completions": "select sum(length(sealed)) from stored_completions where tenant_id = :t",
        "idempotency": "select sum(length(response)) from idempotency_records where tenant_id = :t",
    }
    used = tenant.used()
    with deployment.services.database.read() as session:
        found = {
            kind: session.scalar(text(query), {"t": tenant.id}) for kind, query in sizes.items()
        }
    assert found == {kind: used[kind] for kind in sizes} and all(found.values())
    with closing(browser(deployment, tenant.key)) as page:
        shown = page.get("/dashboard/limits").text
    assert f"{sum(used.values()) / 2**20:,.1f} MiB" in shown and "of 1 MiB, most of it" in shown


def test_a_file_without_a_lifetime_ends_after_thirty_days(deployment: Deployment) -> None:
    made = _file(Tenant(deployment)).json()
    lifetime = datetime.fromtimestamp(made["expires_at"], UTC) - datetime.fromtimestamp(
        made["created_at"], UTC
    )
    assert lifetime == timedelta(days=30)


def _bad(tenant: Tenant) -> httpx.Response:
    return tenant.ask("POST", CHAT, json={**BODY, "max_tokens": -1})


def _unknown_model(tenant: Tenant) -> httpx.Response:
    return tenant.ask("POST", CHAT, json={**BODY, "model": "none"})


def _no_json(tenant: Tenant) -> httpx.Response:
    return tenant.ask("POST", "/v1/responses", content=b"{")


def _replay(tenant: Tenant) -> httpx.Response:
    return tenant.ask("POST", CHAT, json=BODY, headers={"idempotency-key": "same"})


def _delete_nothing(tenant: Tenant) -> httpx.Response:
    return tenant.ask("DELETE", "/v1/files/file-none")


def _batch(tenant: Tenant) -> httpx.Response:
    body = {"input_file_id": "file-none", "endpoint": CHAT, "completion_window": "24h"}
    return tenant.ask("POST", "/v1/batches", json=body)


def _small_conversation(tenant: Tenant) -> httpx.Response:
    return tenant.ask("POST", "/v1/conversations", json={})


def _small_file(tenant: Tenant) -> httpx.Response:
    sent = {"file": ("a.jsonl", b"{}")}
    return tenant.ask("POST", "/v1/files", data={"purpose": "batch"}, files=sent)


@pytest.mark.parametrize(
    "act",
    [
        _bad,
        _unknown_model,
        _no_json,
        _replay,
        _delete_nothing,
        _batch,
        _small_conversation,
        _small_file,
    ],
)
def test_each_call_counts_as_a_request_of_the_plan(
    deployment: Deployment, act: Callable[[Tenant], httpx.Response]
) -> None:
    tenant = Tenant(deployment, requests=4)
    statuses = [act(tenant).status_code for _ in range(7)]
    assert 429 not in statuses[:4] and statuses[4:] == [429] * 3
    assert tenant.ask("GET", "/v1/models").is_success, "reading does not count"
