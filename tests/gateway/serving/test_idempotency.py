"""Idempotency-Key: the same request is done and billed once, whoever repeats it and however."""

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI
from sqlalchemy import func, select, update

from core import idempotency
from core.clock import SystemClock
from core.database import Database
from core.errors import BadRequest, Conflict, RateLimited
from core.idempotency import StoredResponseRow
from core.tenants import key_changes, keys, organisations
from core.tenants.scope import scope_of_operator
from gateway.request.exchange import Exchange
from gateway.serving.relay import RelayExchange
from tests.gateway.deployment import MODEL, Deployment, running_deployment

CHAT = "/v1/chat/completions"
OWNER: Any = None  # nobody is asked who the client is
GOOD: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 3,
}


def post(
    deployment: Deployment, key: str, body: dict[str, Any] | None = None, **more: Any
) -> httpx.Response:
    headers = {**deployment.headers, "idempotency-key": key, **more.pop("headers", {})}
    path = more.pop("path", CHAT)
    return httpx.post(f"{deployment.url}{path}", json=body or GOOD, headers=headers, timeout=60)


def fresh() -> str:
    return str(uuid.uuid4())


@pytest.mark.parametrize("stream", [False, True])
def test_a_repetition_gets_the_same_answer_and_runs_nothing(
    deployment: Deployment, stream: bool
) -> None:
    key, before = fresh(), len(deployment.engine.submitted)
    body = {**GOOD, "stream": stream}
    first, again = post(deployment, key, body), post(deployment, key, body)
    assert first.status_code == again.status_code == 200, again.text
    assert first.content == again.content
    assert first.headers["x-request-id"] == again.headers["x-request-id"]
    assert first.headers["content-type"] == again.headers["content-type"]
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert len(deployment.engine.submitted) == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_who_repeats_at_once_finds_the_answer_kept(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    swift = idempotency.store_response

    def _slow(*told: Any) -> None:
        time.sleep(0.3)
        swift(*told)

    monkeypatch.setattr(idempotency, "store_response", _slow)
    key, body = fresh(), {**GOOD, "stream": stream}
    first, again = post(deployment, key, body), post(deployment, key, body)
    assert (first.status_code, again.status_code) == (200, 200), again.text
    assert again.headers["idempotency-replayed"] == "true"


def test_the_sdks_read_a_replayed_answer(deployment: Deployment, client: OpenAI) -> None:
    key = fresh()
    told = {"Idempotency-Key": key}
    first = client.chat.completions.create(**GOOD, extra_headers=told)
    assert client.chat.completions.create(**GOOD, extra_headers=told) == first
    with Anthropic(base_url=deployment.url, api_key=deployment.key, max_retries=0) as claude:
        told = {"Idempotency-Key": fresh()}
        texts = []
        for _ in range(2):
            with claude.messages.stream(**GOOD, extra_headers=told) as stream:
                texts.append(stream.get_final_text())
    assert texts[0] == texts[1]


def test_another_body_or_route_under_the_key_is_refused(deployment: Deployment) -> None:
    key = fresh()
    assert post(deployment, key).status_code == 200
    other = post(deployment, key, {**GOOD, "max_tokens": 4})
    assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_key_reused")
    assert post(deployment, key, path="/v1/messages").status_code == 400


def test_an_answer_by_the_clients_own_fault_is_kept_too(deployment: Deployment) -> None:
    key, wrong = fresh(), {**GOOD, "temperature": 9}
    first, again = post(deployment, key, wrong), post(deployment, key, wrong)
    assert first.status_code == again.status_code == 400
    assert first.json() == again.json() and again.headers["idempotency-replayed"]


def test_what_failed_by_ours_runs_again(tmp_path: Path) -> None:
    with running_deployment(tmp_path) as deployment:
        key = fresh()
        deployment.call(deployment.engine.die)
        time.sleep(0.1)
        assert post(deployment, key).status_code == 503
        deployment.engine._alive = True
        deadline = time.monotonic() + 60
        while (answer := post(deployment, key)).status_code == 503:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert answer.status_code == 200 and "idempotency-replayed" not in answer.headers


def test_while_it_runs_a_second_is_a_409_and_a_stream_that_broke_is_not_kept(
    tmp_path: Path,
) -> None:
    with running_deployment(tmp_path, token_delay_s=0.05) as deployment:
        key, body = fresh(), {**GOOD, "max_tokens": 40, "stream": True}
        headers = {**deployment.headers, "idempotency-key": key}
        with httpx.stream("POST", f"{deployment.url}{CHAT}", json=body, headers=headers) as first:
            lines = first.iter_lines()
            assert next(lines)
            second = post(deployment, key, body)
            assert second.status_code == 409
            assert second.json()["error"]["code"] == "idempotency_in_progress"
            deployment.call(deployment.engine.die)
            assert any('"error"' in line for line in lines)
        deployment.engine._alive = True
        deadline = time.monotonic() + 60
        while (again := post(deployment, key, body)).status_code in (409, 503):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert again.status_code == 200 and "idempotency-replayed" not in again.headers


def test_a_failure_of_a_relayed_stream_reaches_the_record() -> None:
    """Responses are relayed to the record, which keeps no stream that broke."""
    outer = Exchange({"type": "http", "headers": []}, None, None)
    relay = RelayExchange(RelayExchange(outer, OWNER, b""), OWNER, b"")
    assert not relay.broken
    relay.broken = True
    assert outer.broken


def test_a_client_that_left_a_stream_may_ask_again(tmp_path: Path) -> None:
    with running_deployment(tmp_path, token_delay_s=0.05) as deployment:
        key, body = fresh(), {**GOOD, "max_tokens": 40, "stream": True}
        headers = {**deployment.headers, "idempotency-key": key}
        with httpx.stream("POST", f"{deployment.url}{CHAT}", json=body, headers=headers) as first:
            next(first.iter_lines())
        deployment.engine.token_delay_s = 0
        deadline = time.monotonic() + 60
        while (again := post(deployment, key, body)).status_code == 409:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert again.status_code == 200 and "idempotency-replayed" not in again.headers


def test_many_at_once_run_one(deployment: Deployment) -> None:
    key, before = fresh(), len(deployment.engine.submitted)
    gate = threading.Barrier(8)

    def _send(_number: int) -> int:
        gate.wait()
        return post(deployment, key).status_code

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(_send, range(8)))
    assert set(statuses) <= {200, 409} and 200 in statuses
    assert len(deployment.engine.submitted) == before + 1


def test_another_projects_equal_key_is_another_key(deployment: Deployment) -> None:
    with deployment.services.database.transaction() as session:
        scope = scope_of_operator(deployment.tenant_id)
        project = organisations.create_project(
            session, scope, SystemClock(), name=f"p-{uuid.uuid4().hex[:8]}"
        )
        other = keys.issue(session, scope, SystemClock(), project_id=project.id, name="other")
    key = fresh()
    assert post(deployment, key).status_code == 200
    theirs = post(deployment, key, headers={"authorization": f"Bearer {other.secret}"})
    assert theirs.status_code == 200 and "idempotency-replayed" not in theirs.headers


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb"])
def test_a_wrong_key_is_refused(deployment: Deployment, key: str) -> None:
    answer = post(deployment, key)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "Idempotency-Key"


def test_a_wrong_credential_learns_nothing(deployment: Deployment) -> None:
    key = fresh()
    assert post(deployment, key).status_code == 200
    answer = post(deployment, key, headers={"authorization": "Bearer th_wrong"})
    assert answer.status_code == 401


def claim(
    database: Database, key: str, body: bytes = b"x", tenant: str = "org", max_keys: int = 100
) -> Any:
    with database.transaction() as session:
        return idempotency.claim(
            session,
            tenant_id=tenant,
            project_id="p",
            key=key,
            route=CHAT,
            body=body,
            now=SystemClock().now(),
            longest=timedelta(seconds=60),
            max_keys=max_keys,
        )


def test_claims_on_both_databases(database: Database) -> None:
    name, kept = claim(database, "k")
    assert kept is None
    with pytest.raises(Conflict):
        claim(database, "k")
    with pytest.raises(BadRequest):
        claim(database, "k", b"y")
    with database.transaction() as session:  # its process died long ago
        old = SystemClock().now() - timedelta(minutes=5)
        session.execute(update(StoredResponseRow).values(claimed_at=old))
    assert claim(database, "k") == (name, None)
    with database.transaction() as session:
        idempotency.store_response(
            session, name, idempotency.StoredResponse(200, [("a", "b")], b"z"), {}
        )
    assert claim(database, "k")[1] == idempotency.StoredResponse(200, [("a", "b")], b"z")
    claim(database, "k2", max_keys=2)
    with pytest.raises(RateLimited) as refused:
        claim(database, "k3", max_keys=2)
    # "k" was claimed moments ago, and is free again a day later.
    assert refused.value.retry_after_s == pytest.approx(24 * 3600, abs=60)
    claim(database, "k3", tenant="another", max_keys=2)
    with database.transaction() as session:
        idempotency.drop_expired(session, SystemClock().now() + timedelta(hours=25))
        assert session.scalar(select(func.count(StoredResponseRow.id))) == 0


def test_a_key_that_may_not_use_the_model_any_more_gets_no_stored_answer(
    deployment: Deployment,
) -> None:
    services, scope = deployment.services, scope_of_operator(deployment.tenant_id)
    with services.database.transaction() as session:
        project = organisations.projects(session, scope)[0].id
        made = keys.issue(session, scope, SystemClock(), project_id=project, name="narrowed")
    headers, key = {"authorization": f"Bearer {made.secret}"}, fresh()
    assert post(deployment, key, headers=headers).status_code == 200
    with services.database.transaction() as session:
        scopes = {"models": ["another"]}
        key_changes.change(
            session, scope, SystemClock(), made.id, key_changes.KeyChange(scopes=scopes)
        )
    deadline = time.monotonic() + 10
    while (answer := post(deployment, key, headers=headers)).status_code == 200:
        assert time.monotonic() < deadline, "the stored answer is still given"
        time.sleep(0.05)
    assert answer.status_code == 403 and "may not use the model" in answer.text
    assert post(deployment, fresh(), headers=headers).status_code == 403, "as a new request"
