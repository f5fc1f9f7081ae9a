"""Fallback chains and canaries of a key and of a tenant: who answers, what is shown and charged."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from core.errors import BadRequest, Unavailable
from core.tenants.key_routing import parse_chains, parse_shares, written
from engine.demo.paths import MODEL_DIR
from gateway.catalog.catalog import ServedModel
from gateway.catalog.codec.tokenizing import load_codec
from gateway.cli.main import main
from gateway.engines.clients import Engines
from gateway.engines.fake import FakeEngine
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import MODEL, Deployment, running_deployment

OTHER, THIRD = "other", "third"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Any]]:
    codec = load_codec(MODEL_DIR)
    engines = {
        name: FakeEngine(
            engine_id=f"{name}-engine",
            vocab_size=codec.vocab_size,
            eos_token_ids=codec.eos_token_ids,
        )
        for name in (MODEL, OTHER, THIRD)
    }
    wiring = Engines(
        {name: [engine] for name, engine in engines.items()},
        [ServedModel(name, codec, 512, 0) for name in engines],
    )
    with running_deployment(tmp_path_factory.mktemp("key-routing"), engines=wiring) as deployment:
        with deployment.services.database.transaction() as session:
            for name in (OTHER, THIRD):
                ensure_default_prices(session, SystemClock(), name)
        deployment.services.prices.refresh()
        yield deployment, engines


@pytest.fixture
def deployment(made: tuple[Deployment, Any]) -> Deployment:
    return made[0]


def admin(deployment: Deployment) -> httpx.Client:
    url = f"{deployment.url}/admin/v1"
    return httpx.Client(base_url=url, headers=deployment.headers, timeout=30)


def new_key(deployment: Deployment, **more: Any) -> dict[str, Any]:
    with admin(deployment) as client:
        project = client.get("/projects").json()["data"][0]["id"]
        answer = client.post("/keys", json={"project_id": project, "name": "k", **more})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ask(deployment: Deployment, secret: str, words: str = "Hello", **more: Any) -> Any:
    with OpenAI(base_url=f"{deployment.url}/v1", api_key=secret, max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=[{"role": "user", "content": words}], max_tokens=3, **more
        )
        if more.get("stream"):
            assert {chunk.model for chunk in raw.parse()} == {THIRD}
        return raw


def break_first(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def _refuse(job: Any) -> Any:
        raise Unavailable("It is full for this test.", code="engine_full")

    monkeypatch.setattr(engine, "generate", _refuse)


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_has_a_chain_of_its_own(
    made: tuple[Deployment, Any], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    deployment, engines = made
    key = new_key(deployment, routing={"fallback": {MODEL: [OTHER, THIRD]}})
    assert key["routing"] == {"fallback": {MODEL: [OTHER, THIRD]}}
    break_first(engines[MODEL], monkeypatch)
    break_first(engines[OTHER], monkeypatch)
    raw = ask(deployment, key["secret"], stream=stream)
    assert raw.headers["x-tollhouse-fallback"] == f"{MODEL} -> {OTHER} -> {THIRD}"
    request_id = raw.headers["x-request-id"]
    event = deployment.event(request_id)
    assert (event["model"], event["engine_id"]) == (THIRD, f"{THIRD}-engine")
    assert event["routed"].startswith(f"fallback from {MODEL}, {OTHER}; ")
    with pytest.raises(openai.InternalServerError):
        ask(deployment, deployment.key)  # another key has no chain


def test_a_chain_never_leads_to_a_model_that_the_key_may_not_use(
    made: tuple[Deployment, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, engines = made
    key = new_key(
        deployment,
        scopes={"models": [MODEL, THIRD]},
        routing={"fallback": {MODEL: [OTHER, THIRD]}, "canary": {MODEL: {OTHER: 100}}},
    )
    assert ask(deployment, key["secret"]).parse().model == MODEL
    break_first(engines[MODEL], monkeypatch)
    assert ask(deployment, key["secret"]).parse().model == THIRD


def test_a_key_may_turn_off_the_chain_of_its_tenant(
    made: tuple[Deployment, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, engines = made
    key = new_key(deployment, routing={"fallback": "off"})
    with admin(deployment) as client:
        chain = {"settings": {"fallback": {MODEL: [OTHER]}}}
        assert client.patch("/tenant", json=chain).status_code == 200
        deployment.services.key_cache.poll()
        try:
            break_first(engines[MODEL], monkeypatch)
            assert ask(deployment, deployment.key).parse().model == OTHER
            with pytest.raises(openai.InternalServerError):
                ask(deployment, key["secret"])
        finally:
            client.patch("/tenant", json={"settings": {"fallback": None}})
            deployment.services.key_cache.poll()


def test_a_canary_gets_its_share_and_keeps_its_conversations(deployment: Deployment) -> None:
    key = new_key(deployment, routing={"canary": {MODEL: {OTHER: 30, THIRD: 20}}})
    answers: dict[str, set[str]] = {}
    for number in range(60):
        words = f"Conversation {number}"
        raw = ask(deployment, key["secret"], words)
        answers.setdefault(raw.parse().model, set()).add(words)
        if raw.parse().model != MODEL:
            assert raw.headers["x-tollhouse-canary"] == f"{MODEL} -> {raw.parse().model}"
        else:
            assert "x-tollhouse-canary" not in raw.headers
    assert set(answers) == {MODEL, OTHER, THIRD}
    assert 15 <= len(answers[MODEL]) <= 45  # about half of 60; 15 is 3.9 standard deviations away
    words = min(answers[OTHER])
    raw = ask(deployment, key["secret"], words)
    event = deployment.event(raw.headers["x-request-id"])
    assert event["model"] == OTHER and event["routed"].startswith(f"canary of {MODEL}; ")


def test_a_canary_that_fails_is_replaced_by_the_model_itself(
    made: tuple[Deployment, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, engines = made
    key = new_key(deployment, routing={"canary": {MODEL: {OTHER: 100}}})
    break_first(engines[OTHER], monkeypatch)
    raw = ask(deployment, key["secret"])
    assert raw.parse().model == MODEL
    assert raw.headers["x-tollhouse-fallback"] == f"{OTHER} -> {MODEL}"


def test_a_completion_without_messages_has_its_canary_too(deployment: Deployment) -> None:
    key = new_key(deployment, routing={"canary": {MODEL: {OTHER: 50}}})
    found = set()
    with OpenAI(base_url=f"{deployment.url}/v1", api_key=key["secret"], max_retries=0) as client:
        for number in range(30):
            prompt = f"Text {number}"
            models = {
                client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).model
                for _ in range(2)
            }
            assert len(models) == 1, "the same prompt stays where it is"
            found |= models
    assert found == {MODEL, OTHER}


def test_a_key_is_changed_within_a_second(deployment: Deployment) -> None:
    key = new_key(deployment)
    with admin(deployment) as client:
        changed = client.patch(
            f"/keys/{key['id']}",
            json={
                "routing": {"canary": {MODEL: {THIRD: 100}}},
                "scopes": {"models": [MODEL, THIRD]},
            },
        ).json()
        assert changed["scopes"] == {"models": sorted([MODEL, THIRD])}
        deployment.services.key_cache.poll()
        assert ask(deployment, key["secret"]).parse().model == THIRD
        rotated = client.post(f"/keys/{key['id']}/rotate", json={}).json()
        assert rotated["routing"] == {"canary": {MODEL: {THIRD: 100}}}
        emptied = client.patch(
            f"/keys/{key['id']}", json={"routing": {"canary": None}, "scopes": {"models": None}}
        ).json()
        assert (emptied["routing"], emptied["scopes"]) == ({}, {})
        assert client.patch("/keys/key_none", json={"routing": {}}).status_code == 404


def test_a_restricted_key_cannot_widen_another(deployment: Deployment) -> None:
    owner = new_key(deployment, role="owner", scopes={"models": [MODEL]})
    other = new_key(deployment, scopes={"models": [MODEL]})
    headers = {"authorization": f"Bearer {owner['secret']}"}
    with httpx.Client(base_url=f"{deployment.url}/admin/v1", headers=headers) as client:
        for wider in ({"models": [MODEL, OTHER]}, {"models": None}):
            answer = client.patch(f"/keys/{other['id']}", json={"scopes": wider})
            assert answer.status_code == 403


@pytest.mark.parametrize(
    ("routing", "param"),
    [
        ({"fallback": "on"}, "routing.fallback"),
        ({"fallback": {MODEL: []}}, "routing.fallback"),
        ({"fallback": {MODEL: OTHER}}, "routing.fallback"),
        ({"fallback": {MODEL: ["x"] * 9}}, "routing.fallback"),
        ({"canary": {MODEL: 10}}, "routing.canary"),
        ({"canary": {MODEL: {OTHER: 60, THIRD: 41}}}, "routing.canary"),
        ({"canary": {MODEL: {OTHER: 0}}}, "routing.canary"),
        ({"canary": {MODEL: {OTHER: 1.5}}}, "routing.canary"),
        ({"canary": {MODEL: {OTHER: True}}}, "routing.canary"),
    ],
)
def test_wrong_routing_is_refused_by_name(
    deployment: Deployment, routing: dict[str, Any], param: str
) -> None:
    key = new_key(deployment)
    with admin(deployment) as client:
        answer = client.patch(f"/keys/{key['id']}", json={"routing": routing})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        answer = client.patch("/tenant", json={"settings": routing})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param.replace("routing", "settings")
        unknown = client.patch(f"/keys/{key['id']}", json={"routing": {"mirror": {}}})
        assert unknown.status_code in (400, 422)


def test_the_command_and_the_page_set_them(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(deployment.services.settings.data_dir))
    chains, shares = f"{MODEL}={OTHER},{THIRD}", f"{MODEL}={OTHER}:10"
    options = ["--fallback", chains, "--canary", shares]
    assert main(["key", "new", "--name", "by command", "--json", *options]) == 0
    key_id = json.loads(capsys.readouterr().out)["id"]
    assert main(["key", "set", key_id, "--canary", "", "--model", MODEL, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["routing"] == {"fallback": {MODEL: [OTHER, THIRD]}}
    assert shown["scopes"] == {"models": [MODEL]}
    assert main(["key", "set", key_id, "--canary", "small=large"]) == 2
    with closing(browser(deployment, with_role(deployment, "owner"))) as owner:
        with admin(deployment) as client:
            project = client.get("/projects").json()["data"][0]["id"]
        form = {"act": "create", "name": "by page", "project_id": project, "role": "developer"}
        wrong = owner.post("/dashboard/keys", data=form | {"canary": "nonsense"})
        assert wrong.status_code == 400 and "is not a canary setting" in wrong.text
        made = owner.post("/dashboard/keys", data=form | {"fallback": chains, "canary": shares})
        assert made.status_code == 200
        text = f"{MODEL} falls back to {OTHER}, {THIRD}; 10 % of {MODEL} to {OTHER}"
        assert text in made.text


def test_a_request_shows_its_canary_on_its_page(deployment: Deployment) -> None:
    key = new_key(deployment, routing={"canary": {MODEL: {OTHER: 100}}})
    request_id = ask(deployment, key["secret"]).headers["x-request-id"]
    deployment.event(request_id)
    with closing(browser(deployment, with_role(deployment, "owner"))) as owner:
        shown = owner.get(f"/dashboard/requests/{request_id}").text
    assert f"canary of {MODEL}; the only one ready" in shown


def test_text_is_read_as_it_is_written() -> None:
    assert parse_chains("a=b, c; d=e") == {"a": ["b", "c"], "d": ["e"]}
    assert (parse_chains(""), parse_chains(" off ")) == (None, "off")
    assert parse_shares("a=b:10,c:5;d=e:f:1") == {"a": {"b": 10, "c": 5}, "d": {"e:f": 1}}
    assert written({"fallback": "off", "canary": {"a": {"b": 1}}}) == "no fallback; 1 % of a to b"
    for text in ("a", "a=", "=b"):
        with pytest.raises(BadRequest):
            parse_chains(text)
