"""What operators do on pages: drain and resume an engine, and read the settings in force."""

from contextlib import closing
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from core.settings import Settings, load_settings
from core.settings_in_force import settings_in_force
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import MODEL, Deployment

PAGE = "/dashboard/operator/engines"


def ask(deployment: Deployment) -> int:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    url = f"{deployment.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=deployment.headers, timeout=60).status_code


def test_an_engine_is_drained_and_resumed_from_its_page(
    deployment: Deployment, operator: httpx.Client
) -> None:
    name = deployment.engine.engine_id
    assert ask(deployment) == 200
    drained = operator.post(PAGE, data={"act": "drain", "engine": name})
    assert drained.history[0].status_code == 303, "a reload sends nothing again"
    assert "gets no new requests" in drained.text and "draining" in drained.text
    assert ">Resume<" in drained.text and ">Drain<" not in drained.text
    assert ask(deployment) == 503
    resumed = operator.post(PAGE, data={"act": "resume", "engine": name})
    assert "gets requests again" in resumed.text and ask(deployment) == 200
    with deployment.services.database.read() as session:
        acts = session.execute(
            text("select action from audit_log where target = :name order by id"), {"name": name}
        ).scalars()
        assert list(acts) == ["engine.drain", "engine.resume"]


def test_an_engine_is_listed_with_the_name_that_requests_use(operator: httpx.Client) -> None:
    rows = operator.get(f"{PAGE}?format=csv").text.splitlines()
    assert [line.split(",")[1] for line in rows[1:]] == [MODEL]


def test_an_unknown_engine_and_a_tenants_role_are_refused(
    deployment: Deployment, operator: httpx.Client
) -> None:
    refused = operator.post(PAGE, data={"act": "drain", "engine": "nothing"})
    assert refused.status_code == 400 and "There is no engine" in refused.text
    with closing(browser(deployment, with_role(deployment, "owner"))) as owner:
        for path in (PAGE, "/dashboard/operator/configuration"):
            assert owner.get(path).status_code == 403
        act = {"act": "drain", "engine": deployment.engine.engine_id}
        assert owner.post(PAGE, data=act).status_code == 403
    assert ask(deployment) == 200


def test_the_page_has_every_setting_and_no_secret(
    deployment: Deployment, operator: httpx.Client
) -> None:
    page = operator.get("/dashboard/operator/configuration")
    assert page.status_code == 200
    csv = operator.get("/dashboard/operator/configuration?format=csv").text
    for field in Settings.model_fields:
        assert f"TOLLHOUSE_{field.upper()}" in csv
    assert deployment.services.operator_token not in page.text


def test_each_value_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.env"
    file.write_text("TOLLHOUSE_WORKERS=3\nTOLLHOUSE_STRIPE_API_KEY=sk_in_file\n")
    upstreams = '[{"url": "http://u:pw@gpu:1", "model": "m", "api_key": "sk-up"}]'
    for name, value in {
        "ENV_FILE": str(file),
        "PORT": "8123",
        "DATABASE_URL": "postgresql://bob:hunter2@db/tolls?password=again",
        "REDIS_URL": "redis://:hunter3@cache:6379/0",
        "ADMIN_TOKEN": "token-in-environment",
        "UPSTREAMS": upstreams,
    }.items():
        monkeypatch.setenv(f"TOLLHOUSE_{name}", value)
    found = {each.name: each for each in settings_in_force(load_settings(model="given"))}
    sources = {name.removeprefix("TOLLHOUSE_"): each.source for name, each in found.items()}
    assert (sources["PORT"], sources["WORKERS"]) == ("environment", "file")
    assert (sources["MODEL"], sources["HOST"]) == ("command", "default")
    assert found["TOLLHOUSE_PORT"].value == "8123" and found["TOLLHOUSE_WORKERS"].value == "3"
    shown = "".join(each.value for each in found.values())
    for secret in ("hunter2", "hunter3", "again", "sk_in_file", "sk-up", "pw@", "token-in"):
        assert secret not in shown, secret
    assert found["TOLLHOUSE_DATABASE_URL"].value == "postgresql://***@db/tolls?password=***"
    assert '"model": "m"' in found["TOLLHOUSE_UPSTREAMS"].value
