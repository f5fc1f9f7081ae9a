"""Strikes suspend a key by rule, an appeal voids one, the operator frees the key: over HTTP and CLI."""

import csv
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.clock import SystemClock
from core.queue import TaskContext
from gateway.cli.main import main
from moderation import tasks
from tests.gateway.deployment import MODEL, Deployment, running_deployment

POLICY = {"input": {"deny": ["zeppelin"]}, "strikes": {"limit": 2, "window_hours": 1}}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    with running_deployment(tmp_path) as made:
        answer = admin(made, "PUT", "/policies", json=POLICY)
        assert answer.status_code == 200, answer.text
        yield made


def admin(
    deployment: Deployment, method: str, path: str, *, operator: bool = False, **more: Any
) -> Any:
    token = deployment.services.operator_token if operator else deployment.key
    headers = {"authorization": f"Bearer {token}"}
    url = f"{deployment.url}/admin/v1{path}"
    return httpx.request(method, url, headers=headers, timeout=60, **more)


def ask(deployment: Deployment, key: str, text: str) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(
        f"{deployment.url}/v1/chat/completions", json=body, headers=headers, timeout=30
    )


def bot(deployment: Deployment) -> tuple[str, str]:
    """A key of its own, so that the tenant's admin key stays free."""
    projects = admin(deployment, "GET", "/projects").json()["data"]
    body = {"project_id": projects[0]["id"], "name": "bot", "role": "developer"}
    made = admin(deployment, "POST", "/keys", json=body).json()
    return made["id"], made["secret"]


def recorded(deployment: Deployment, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 60
    while True:
        rows: list[dict[str, Any]] = admin(deployment, "GET", "/decisions?action=block").json()[
            "data"
        ]
        if len(rows) >= count:
            return rows
        assert time.monotonic() < deadline, f"{len(rows)} blocked, {count} were expected"
        time.sleep(0.02)


def apply_rules(deployment: Deployment) -> list[str]:
    services = deployment.services
    found = tasks.apply_strikes(TaskContext(services.settings, services.database, SystemClock()))
    return list(found)


def until(deployment: Deployment, key: str, status: int) -> None:
    deadline = time.monotonic() + 60
    while ask(deployment, key, "hello").status_code != status:
        assert time.monotonic() < deadline, f"the key never answered {status}"
        time.sleep(0.05)


def test_strikes_suspend_a_key_and_the_operator_frees_it(own: Deployment) -> None:
    key_id, secret = bot(own)
    for _ in range(2):
        assert ask(own, secret, "a zeppelin").status_code == 400
    recorded(own, 2)
    assert apply_rules(own) == [key_id]
    until(own, secret, 401)
    listed = admin(own, "GET", "/suspensions").json()["data"]
    assert [(each["key_id"], each["strikes"]) for each in listed] == [(key_id, 2)]
    assert admin(own, "DELETE", f"/suspensions/{key_id}").status_code == 403
    freed = admin(own, "DELETE", f"/suspensions/{key_id}", operator=True)
    assert freed.json() == {"key_id": key_id, "suspended": False}
    until(own, secret, 200)
    assert apply_rules(own) == []
    assert admin(own, "DELETE", f"/suspensions/{key_id}", operator=True).status_code == 404


def test_a_granted_appeal_voids_its_strike(own: Deployment) -> None:
    _, secret = bot(own)
    ids = [ask(own, secret, "a zeppelin").headers["x-request-id"] for _ in range(2)]
    recorded(own, 2)
    body = {"request_id": ids[0], "reason": "It was about a museum."}
    made = admin(own, "POST", "/appeals", json=body)
    assert made.status_code == 201
    assert admin(own, "POST", "/appeals", json=body).status_code == 409
    path = f"/appeals/{made.json()['id']}/ruling"
    # Nobody judges his own case.
    assert admin(own, "POST", path, json={"grant": True}).status_code == 403
    ruled = admin(own, "POST", path, operator=True, json={"grant": True, "answer": "So it was."})
    assert ruled.json()["status"] == "granted"
    assert admin(own, "POST", path, operator=True, json={"grant": False}).status_code == 409
    listed = admin(own, "GET", "/appeals?status=granted").json()["data"]
    assert [(each["request_id"], each["answer"]) for each in listed] == [(ids[0], "So it was.")]
    assert apply_rules(own) == []
    assert ask(own, secret, "hello").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/appeals", {"request_id": "req_404", "reason": "why"}, 404),
        ("POST", "/appeals", {"request_id": "req_1", "reason": ""}, 400),
        ("POST", "/appeals", {"request_id": "req_1", "reason": "x", "direction": "up"}, 400),
        ("GET", "/appeals?status=lost", None, 400),
        ("GET", "/decisions/export?since=soon", None, 400),
    ],
)
def test_bad_calls_are_told_so(
    own: Deployment, method: str, path: str, body: dict[str, str] | None, status: int
) -> None:
    assert admin(own, method, path, json=body).status_code == status


def test_an_unknown_appeal_cannot_be_ruled_on(own: Deployment) -> None:
    answer = admin(own, "POST", "/appeals/nothing/ruling", operator=True, json={"grant": True})
    assert answer.status_code == 404


def test_the_export_has_every_decision_and_no_text(own: Deployment) -> None:
    _, secret = bot(own)
    ask(own, secret, "a zeppelin")
    passed = ask(own, secret, "good morning").headers["x-request-id"]
    deadline = time.monotonic() + 60
    while True:
        text = admin(own, "GET", "/decisions/export").text
        rows = list(csv.DictReader(io.StringIO(text)))
        if {row["action"] for row in rows if row["request_id"] == passed} == {"allow"}:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert any(row["action"] == "block" for row in rows)
    assert "zeppelin" not in text and "morning" not in text


def run(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main([*words, "--tenant", "demo", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_same_by_command(own: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    key_id, secret = bot(own)
    request_ids = [ask(own, secret, "a zeppelin").headers["x-request-id"] for _ in range(3)]
    recorded(own, 3)
    rows = run(capsys, "policy", "decisions", "--action", "block")
    assert {row["request_id"] for row in rows} == set(request_ids)
    assert run(capsys, "policy", "decisions", "--acted", "--limit", "1")
    made = run(capsys, "policy", "appeal", request_ids[0], "--reason", "A museum's prompt.")
    assert run(capsys, "policy", "appeals", "--status", "open")[0]["id"] == made["id"]
    ruled = run(capsys, "policy", "rule", made["id"], "--deny", "--answer", "It stands.")
    assert ruled["status"] == "denied"
    assert apply_rules(own) == [key_id]
    assert [row["key_id"] for row in run(capsys, "policy", "suspensions")] == [key_id]
    assert run(capsys, "policy", "lift-suspension", key_id) == {
        "key_id": key_id,
        "suspended": False,
    }
    assert run(capsys, "policy", "suspensions") == []
    assert main(["policy", "export", "--tenant", "demo"]) == 0
    assert request_ids[0] in capsys.readouterr().out
    assert main(["policy", "free", key_id, "--tenant", "demo"]) == 2
