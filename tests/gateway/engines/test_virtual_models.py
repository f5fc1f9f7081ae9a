"""Virtual models: which model of a pool answers, what the client reads of it, and what is charged."""

import json
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from billing.pricing.prices import PriceDraft, load_price_book, save
from billing.usage.usage import record
from core.clock import SystemClock
from core.errors import SettingError
from engine.demo.paths import MODEL_DIR
from gateway.catalog.catalog import ServedModel
from gateway.catalog.codec.tokenizing import load_codec
from gateway.catalog.virtual_models import Facts, read_virtual_models
from gateway.cli.main import main
from gateway.engines.clients import Engines
from gateway.engines.fake import FakeEngine
from tests.dashboards.usage_events import usage_event
from tests.gateway.deployment import MODEL, Deployment, running_deployment

OTHER = "other"
POOLS = {
    "fast": MODEL,
    "spare": ["gone", OTHER, MODEL],
    "tools": [{"model": OTHER, "when": {"tools": True}}, MODEL],
    "long": [{"model": OTHER, "when": {"tokens_from": 50}}, {"model": MODEL, "when": {}}],
    "never": [{"model": OTHER, "when": {"tenants": ["nobody"]}}],
    "cheap": {"choose": "cheapest", "models": [MODEL, OTHER]},
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    codec = load_codec(MODEL_DIR)
    clients = {
        name: [
            FakeEngine(
                engine_id=f"{name}-engine",
                vocab_size=codec.vocab_size,
                eos_token_ids=codec.eos_token_ids,
            )
        ]
        for name in (MODEL, OTHER)
    }
    served = [
        ServedModel(name, codec, 512, 0, capabilities=frozenset({"tools"})) for name in clients
    ]
    settings = {"virtual_models": json.dumps(POOLS)}
    path = tmp_path_factory.mktemp("virtual")
    with running_deployment(path, engines=Engines(clients, served), settings=settings) as made:
        clock = SystemClock()
        with made.services.database.transaction() as session:
            draft = PriceDraft(OTHER, {"input": "0.01", "output": "0.02"}, clock.now())
            save(session, clock, draft)
        made.services.prices.refresh()
        yield made


def _ask(gateway: Deployment, model: str, text: str = "Hi", **more: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    return httpx.post(
        f"{gateway.url}/v1/chat/completions", json=body | more, headers=gateway.headers, timeout=60
    )


@pytest.mark.parametrize(
    ("model", "more", "answers"),
    [
        ("fast", {}, MODEL),
        ("spare", {}, OTHER),
        ("tools", {}, MODEL),
        ("tools", {"tools": [TOOL]}, OTHER),
        ("long", {}, MODEL),
        ("long", {"text": "word " * 60}, OTHER),
        ("cheap", {}, OTHER),
    ],
)
def test_the_pools_model_answers_and_is_charged(
    gateway: Deployment, model: str, more: dict[str, Any], answers: str
) -> None:
    answer = _ask(gateway, model, **more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    assert answer.headers["x-tollhouse-virtual-model"] == f"{model} -> {answers}"
    event = gateway.event(answer.headers["x-request-id"])
    assert event["model"] == answers and event["routed"].startswith(f"of {model}; ")


def test_a_request_for_which_no_condition_holds_is_refused(gateway: Deployment) -> None:
    answer = _ask(gateway, "never")
    assert answer.status_code == 400 and "conditions" in answer.json()["error"]["message"]


def test_virtual_models_are_listed(gateway: Deployment) -> None:
    listed = httpx.get(f"{gateway.url}/v1/models", headers=gateway.headers).json()["data"]
    assert {*POOLS, MODEL, OTHER} <= {each["id"] for each in listed}
    one = httpx.get(f"{gateway.url}/v1/models/fast", headers=gateway.headers).json()
    assert one["id"] == "fast"
    missing = _ask(gateway, "nothing").json()["error"]
    assert missing["code"] == "model_not_found" and "fast" in missing["message"]


def test_recorded_requests_are_tried_without_sending_them(
    gateway: Deployment,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services = gateway.services
    now = services.clock.now()
    with services.database.transaction() as session:
        for model, rates in (("from", {"input": "1"}), ("to", {"input": "3"})):
            save(session, services.clock, PriceDraft(model, rates, now - timedelta(hours=1)))
        price = load_price_book(session).pin("", "from", None, now, "USD").id
        events = [
            usage_event(
                now,
                price,
                tenant_id=gateway.tenant_id,
                model="from",
                input_tokens=tokens,
                output_tokens=0,
            )
            for tokens in (1_000_000, 2_000_000, 10)
        ]
        record(session, events, services.clock)
    pools = tmp_path / "pools.json"
    long = {"model": "to", "when": {"tokens_from": 1_500_000}}
    unpriced = {"model": "unpriced", "when": {"tokens_below": 100}}
    here = {"model": "from", "when": {"tokens_below": 1_500_000}}
    pools.write_text(json.dumps({"v": [long, unpriced, here], "w": "from"}))
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(services.settings.data_dir))
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", services.settings.effective_database_url)
    command = ["model", "route", "--pools", str(pools), "--model", "from", "--json"]
    command += ["--to", (now + timedelta(hours=1)).isoformat()]
    assert main([*command, "--virtual", "v"]) == 0
    rows = {each["model"]: each for each in json.loads(capsys.readouterr().out)}
    found = {n: (each["requests"], each["cost"], each["cost_there"]) for n, each in rows.items()}
    assert found == {
        "from": (1, "1", "1"),
        "to": (1, "2", "6"),
        "unpriced": (1, "0.00001", None),
    }
    assert main(command) == 2 and "--virtual" in capsys.readouterr().err
    assert main([*command, "--virtual", "x"]) == 2


def test_a_conversation_keeps_its_model_and_weights_hold_over_many() -> None:
    given = {"choose": "weighted", "models": [{"model": "a", "weight": 3}, {"model": "b"}]}
    (pool,) = read_virtual_models(json.dumps({"ab": given})).values()
    facts = Facts(frozenset(), frozenset(), 1)
    first = Counter(pool.ranked(facts, n / 10, lambda _: None)[0] for n in range(1000))
    assert first == {"a": 750, "b": 250}
    assert pool.ranked(facts, 80.0, lambda _: None) == ["b", "a"]


@pytest.mark.parametrize(
    ("when", "holds"),
    [
        ({"tenants": ["acme"]}, True),
        ({"tenants": ["other"]}, False),
        ({"labels": ["team=search"]}, True),
        ({"labels": ["team=search", "team=ads"]}, False),
        ({"tokens_from": 10, "tokens_below": 11}, True),
        ({"tokens_below": 10}, False),
        ({"tools": False}, True),
        ({"images": False}, False),  # it is not known
    ],
)
def test_conditions(when: dict[str, Any], holds: bool) -> None:
    (pool,) = read_virtual_models(json.dumps({"v": [{"model": "m", "when": when}]})).values()
    facts = Facts(frozenset(("acme",)), frozenset(("team=search",)), 10, images=None)
    assert pool.ranked(facts, 0, lambda _: None) == (["m"] if holds else [])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("/nowhere/pools.json", "cannot be read"),
        ("{", "not JSON"),
        ('{"a": 1}', "neither a model"),
        ('{"a": []}', "list of 1 to"),
        ('{"a": ["b"], "b": "c"}', "names the virtual model 'b'"),
        ('{"a": {"models": ["b"], "pick": 1}}', "unknown field 'pick'"),
        ('{"a": {"models": ["b"], "choose": "best"}}', "choose of 'a'"),
        ('{"a": [{"model": "b", "weight": 0}]}', "weight of 'b'"),
        ('{"a": [{"model": "b", "weight": true}]}', "weight of 'b'"),
        ('{"a": [{"model": "b", "when": {"tools": 1}}]}', "not true or false"),
        ('{"a": [{"model": "b", "when": {"tokens_from": -1}}]}', "whole number"),
        ('{"a": [{"model": "b", "when": {"labels": ["x"]}}]}', "labels of"),
        ('{"": "b"}', "is not a name"),
    ],
)
def test_a_wrong_setting_stops_the_start_and_says_what_is_wrong(setting: str, said: str) -> None:
    with pytest.raises(SettingError) as caught:
        read_virtual_models(setting)
    assert said in caught.value.message
