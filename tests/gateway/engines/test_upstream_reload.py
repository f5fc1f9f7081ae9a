"""The list of upstreams is read again from its file while requests run: by page, API and command."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from billing.pricing.prices import ensure_default_prices
from billing.rating.rating_worker import rate_all
from billing.usage import service_rollups
from core.clock import SystemClock
from gateway.cli.main import main
from tests.dashboards.browser_client import browser
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream

CHAT = "/v1/chat/completions"
ADMIN = "/admin/v1/engines/upstreams"
PAGE = "/dashboard/operator/engines/upstreams"


def answer_of(words: str) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    message = {"role": "assistant", "content": words}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    with upstream() as old, upstream() as new:
        old.answers[CHAT], new.answers[CHAT] = answer_of("old"), answer_of("new")
        yield old, new


@pytest.fixture
def file(tmp_path: Path, servers: tuple[Server, Server]) -> Path:
    path = tmp_path / "upstreams.json"
    write(path, {"url": servers[0].url, "name": "first", "model": "one", "api_key": "sk-hidden"})
    return path


@pytest.fixture
def deployment(tmp_path: Path, file: Path) -> Iterator[Deployment]:
    with running_deployment(
        tmp_path / "data", settings={"upstreams": str(file)}, engines=None
    ) as made:
        with made.services.database.transaction() as session:
            ensure_default_prices(session, SystemClock(), "one")
        made.services.prices.refresh()
        yield made


def write(path: Path, *entries: dict[str, Any]) -> None:
    path.write_text(json.dumps(entries))


def ask(deployment: Deployment, model: str = "one") -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}]}
    return httpx.post(f"{deployment.url}{CHAT}", json=body, headers=deployment.headers, timeout=60)


def said(deployment: Deployment, model: str = "one") -> str:
    answer = ask(deployment, model)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def admin(deployment: Deployment) -> httpx.Client:
    token = deployment.services.operator_token
    headers = {"authorization": f"Bearer {token}"}
    return httpx.Client(base_url=deployment.url, headers=headers, timeout=60)


def until(happens: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_running_request_ends_where_it_began_and_the_next_goes_to_the_new_engine(
    deployment: Deployment, file: Path, servers: tuple[Server, Server]
) -> None:
    old, new = servers
    began, may_end = threading.Event(), threading.Event()

    def _slowly(_body: dict[str, Any]) -> dict[str, Any]:
        began.set()
        assert may_end.wait(60)
        return answer_of("old, late")

    old.answers[CHAT] = _slowly
    answers: list[str] = []
    running = threading.Thread(target=lambda: answers.append(said(deployment)))
    running.start()
    assert began.wait(30)
    write(
        file,
        {"url": new.url, "name": "second", "model": "one"},
        {"url": new.url, "name": "third", "model": "two", "price": {"input": "1", "output": "2"}},
    )
    with admin(deployment) as client:
        shown = client.get(ADMIN).json()
        assert {(each["upstream"], each["change"]) for each in shown["changes"]} == {
            ("first", "removed"),
            ("second", "added"),
            ("third", "added"),
        }
        assert "sk-hidden" not in json.dumps(shown)
        done = client.post(f"{ADMIN}/reload", json={"digest": shown["digest"]})
        assert done.status_code == 200, done.text
        assert client.get(ADMIN).json()["changes"] == []
    assert said(deployment) == "new"
    until(lambda: ask(deployment, "two").status_code == 200, "the new model has its price")
    may_end.set()
    running.join(60)
    assert answers == ["old, late"]
    router = deployment.services.router
    until(lambda: len(list(router.engines())) == 2, "the old client is closed when it is idle")
    with deployment.services.database.read() as session:
        row = session.execute(
            text("select actor, after from audit_log where action = 'upstreams.reload'")
        ).one()
    assert "sk-hidden" not in str(row.after) and shown["digest"] in str(row.after)


def test_a_removed_model_is_unknown_and_a_kept_engine_keeps_its_connection(
    deployment: Deployment, file: Path, servers: tuple[Server, Server]
) -> None:
    kept = next(iter(deployment.services.router.engines()))
    first = json.loads(file.read_text())[0]
    write(file, {**first, "canary_percent": 5}, {"url": servers[1].url, "model": "two"})
    with admin(deployment) as client:
        digest = client.get(ADMIN).json()["digest"]
        assert client.post(f"{ADMIN}/reload", json={"digest": digest}).status_code == 200
        assert kept in list(deployment.services.router.engines())
        assert deployment.services.router.canaries == {"first": 5}
        write(file, {"url": servers[1].url, "model": "two"})
        digest = client.get(ADMIN).json()["digest"]
        client.post(f"{ADMIN}/reload", json={"digest": digest})
    gone = ask(deployment)
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"


WRONG = {
    "[": "not JSON",
    "[]": "names no engine",
    '[{"url": "http://a", "colour": "red"}]': "unknown field",
    '[{"url": "http://a", "engine": "vlm"}]': "vlm",
    '[{"url": "http://a", "tokenizer": "/nothing"}]': "/nothing",
}


def test_a_wrong_file_is_refused_with_its_reason_and_changes_nothing(
    deployment: Deployment, file: Path
) -> None:
    with admin(deployment) as client:
        for content, words in WRONG.items():
            file.write_text(content)
            refused = client.get(ADMIN)
            assert refused.status_code == 409 and words in refused.text, refused.text
            again = client.post(f"{ADMIN}/reload", json={"digest": "x"})
            assert again.status_code == 409 and words in again.text
            assert said(deployment) == "old"


def test_what_is_served_by_is_what_was_shown(
    deployment: Deployment, file: Path, servers: tuple[Server, Server]
) -> None:
    write(file, {"url": servers[1].url, "name": "second", "model": "one"})
    with admin(deployment) as client:
        digest = client.get(ADMIN).json()["digest"]
        write(file, {"url": servers[1].url, "name": "other", "model": "one"})
        refused = client.post(f"{ADMIN}/reload", json={"digest": digest})
    assert refused.status_code == 409 and "has changed" in refused.text
    assert said(deployment) == "old"


def test_other_processes_follow(
    deployment: Deployment, file: Path, servers: tuple[Server, Server], tmp_path: Path
) -> None:
    settings = {"upstreams": str(file)}
    with running_deployment(tmp_path / "data", settings=settings, engines=None) as other:
        write(file, {"url": servers[1].url, "name": "second", "model": "one"})
        with admin(deployment) as client:
            digest = client.get(ADMIN).json()["digest"]
            client.post(f"{ADMIN}/reload", json={"digest": digest})
        names = lambda: [each.name for each in other.services.router.replicas()]  # noqa: E731
        until(lambda: names() == ["second"], "the other process serves by the file too")


def test_the_page_shows_what_changes_and_serves_by_it(
    deployment: Deployment, file: Path, servers: tuple[Server, Server]
) -> None:
    with closing(browser(deployment, deployment.services.operator_token)) as client:
        assert PAGE in client.get("/dashboard/operator/engines").text
        assert "The file is what the gateway serves by" in client.get(PAGE).text
        write(file, {"url": servers[1].url, "name": "first", "model": "one"})
        shown = client.get(PAGE)
        assert ">changed<" in shown.text and "url, api_key" in shown.text
        assert "sk-hidden" not in shown.text
        digest = shown.text.partition('name="digest" value="')[2].partition('"')[0]
        done = client.post(PAGE, data={"act": "reload", "digest": digest})
        assert done.history[0].status_code == 303 and "serves by the file" in done.text
        assert said(deployment) == "new"
        stale = client.post(PAGE, data={"act": "reload", "digest": "older"})
        assert stale.status_code == 409 and "has changed since it was shown" in stale.text
        file.write_text("{}")
        assert "not a list" in client.get(PAGE).text
    with closing(browser(deployment, deployment.key)) as owner:
        assert owner.get(PAGE).status_code == 403


def test_the_command_does_the_same(
    deployment: Deployment,
    file: Path,
    servers: tuple[Server, Server],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(deployment.services.settings.data_dir))
    write(file, {"url": servers[1].url, "name": "second", "model": "one"})
    command = ["model", "reload", "--url", deployment.url, "--json"]
    assert main([*command, "--dry-run"]) == 0
    assert {each["change"] for each in json.loads(capsys.readouterr().out)["changes"]} == {
        "added",
        "removed",
    }
    assert said(deployment) == "old"
    assert main(command) == 0
    assert said(deployment) == "new"
    file.write_text("[")
    assert main(command) == 2
    assert "not JSON" in capsys.readouterr().err


def test_a_list_that_is_in_no_file_cannot_be_read_again(
    tmp_path: Path, servers: tuple[Server, Server]
) -> None:
    entries = json.dumps([{"url": servers[0].url, "model": "one"}])
    with (
        running_deployment(tmp_path, settings={"upstreams": entries}, engines=None) as made,
        admin(made) as client,
    ):
        refused = client.get(ADMIN)
        assert refused.status_code == 409 and "not in a file" in refused.text


def test_usage_is_grouped_by_engine_and_by_the_region_of_its_entry(
    deployment: Deployment, file: Path, servers: tuple[Server, Server]
) -> None:
    kept = next(iter(deployment.services.router.engines()))
    deployment.event(ask(deployment).headers["x-request-id"])
    with closing(browser(deployment, deployment.key)) as owner:

        def _groups(by: str) -> list[str]:
            rate_all(deployment.services.database, deployment.services.clock)
            service_rollups.sum_all(deployment.services.database, deployment.services.clock)
            lines = owner.get(f"/dashboard/usage?by={by}&format=csv").text.splitlines()
            return sorted(line.rsplit(",", 5)[0] for line in lines[1:])

        assert (_groups("engine_id"), _groups("region")) == (["first"], ["no region"])
        first = json.loads(file.read_text())[0] | {"region": "eu-central"}
        write(file, first, {"url": servers[1].url, "name": "second", "model": "two"})
        with admin(deployment) as client:
            digest = client.get(ADMIN).json()["digest"]
            client.post(f"{ADMIN}/reload", json={"digest": digest})
        until(lambda: ask(deployment, "two").status_code == 200, "the new model has its price")
        deployment.event(ask(deployment, "two").headers["x-request-id"])
        assert kept in list(deployment.services.router.engines())
        assert _groups("engine_id") == ["first", "second"]
        assert _groups("region") == ["eu-central", "no region"]
        shown = owner.get("/dashboard/usage?by=region&compare=1")
        assert shown.status_code == 200 and "Usage by region" in shown.text
    file.write_text('[{"url": "http://a", "region": 5}]')
    with admin(deployment) as client:
        assert "region of http://a" in client.get(ADMIN).text
