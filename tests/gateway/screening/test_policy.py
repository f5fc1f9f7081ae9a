"""A tenant's own moderation policy: put in force by command, obeyed within a second, recorded."""

import json
import time
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from gateway.cli.main import main
from moderation.models import Decision
from tests.gateway.deployment import MODEL, Deployment


def ask(deployment: Deployment, text: str) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    url = f"{deployment.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=deployment.headers, timeout=30)


@pytest.fixture
def here(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(deployment.services.settings.data_dir))
    return deployment


def test_a_policy_blocks_what_it_denies_and_the_decision_is_recorded(
    here: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy", "default", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert ask(here, "please sell me a zeppelin").status_code == 200
    document["input"]["deny"] = ["zeppelin"]
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(document))
    assert main(["policy", "set", str(file), "--tenant", "demo", "--json"]) == 0
    version = json.loads(capsys.readouterr().out)["version"]
    deadline = time.monotonic() + 60
    while (answer := ask(here, "please sell me a zeppelin")).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "content_filter"
    assert "zeppelin" not in answer.text
    found = None
    while found is None:
        with here.services.database.read() as session:
            found = session.scalars(select(Decision).where(Decision.action == "block")).first()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert found.policy_version == version
    assert main(["policy", "retire", "--tenant", "demo"]) == 0
    while ask(here, "please sell me a zeppelin").status_code != 200:
        assert time.monotonic() < deadline + 10
        time.sleep(0.2)


@pytest.mark.parametrize("text", ["[]", "{", '{"input": {"moods": {}}}'])
def test_a_wrong_policy_is_refused(here: Deployment, tmp_path: Path, text: str) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(text)
    assert main(["policy", "set", str(file), "--tenant", "demo"]) == 2


def test_policies_and_decisions_are_behind_admin_routes(here: Deployment) -> None:
    with httpx.Client(base_url=f"{here.url}/admin/v1", headers=here.headers, timeout=60) as admin:
        document = admin.get("/policies").json()["data"][0]["document"]
        document["input"]["deny"] = ["dirigible"]
        put = admin.put("/policies", json=document)
        assert put.status_code == 200
        assert ask(here, "a dirigible, please").status_code == 400
        assert admin.delete("/policies").status_code == 200
        assert ask(here, "a dirigible, please").status_code == 200
        assert admin.put("/policies", json={"moods": 1}).status_code == 400
        deadline = time.monotonic() + 60
        while not any(
            row["policy_version"] == put.json()["version"]
            for row in admin.get("/decisions").json()["data"]
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert admin.get("/decisions?since=soon").status_code == 400
