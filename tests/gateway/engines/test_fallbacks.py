"""Chains of models: who answers, what is shown, what is charged."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from billing.pricing.prices import PriceDraft, save
from billing.pricing.tables import PriceVersionRow
from core.clock import SystemClock
from core.errors import SettingError
from engine.demo.paths import MODEL_DIR
from gateway.catalog.catalog import ServedModel
from gateway.catalog.codec.tokenizing import load_codec
from gateway.engines.clients import Engines
from gateway.engines.fake import FakeEngine
from gateway.engines.routing.fallbacks import read_fallbacks
from tests.gateway.deployment import MODEL, Deployment, running_deployment

OTHER = "other"


@pytest.fixture
def chained(tmp_path: Path) -> Iterator[tuple[Deployment, dict[str, FakeEngine]]]:
    codec = load_codec(MODEL_DIR)
    engines = {
        name: FakeEngine(
            engine_id=f"{name}-engine",
            vocab_size=codec.vocab_size,
            eos_token_ids=codec.eos_token_ids,
            token_delay_s=0.01,
        )
        for name in (MODEL, OTHER)
    }
    wiring = Engines(
        {name: [engine] for name, engine in engines.items()},
        [ServedModel(name, codec, 512, 0) for name in engines],
    )
    settings = {"fallbacks": f"{MODEL}=unknown,{OTHER}"}
    with running_deployment(tmp_path, engines=wiring, settings=settings) as deployment:
        price = {"input": "10", "cached_input": "10", "output": "20"}
        with deployment.services.database.transaction() as session:
            clock = SystemClock()
            save(session, clock, PriceDraft(OTHER, price, clock.now(), note="dear"))
        deployment.services.prices.refresh()
        yield deployment, engines


def ask(deployment: Deployment, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    url = f"{deployment.url}/v1/chat/completions"
    return httpx.post(url, json=body | more, headers=deployment.headers, timeout=30)


def die_with_it(engine: FakeEngine) -> None:
    async def _die(request: Any, mailbox: Any) -> None:
        engine.die()

    engine._run = _die  # type: ignore[method-assign]


@pytest.mark.parametrize("when", ["before", "with the request"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_next_model_answers_and_is_what_is_charged(
    chained: tuple[Deployment, dict[str, FakeEngine]], when: str, stream: bool
) -> None:
    deployment, engines = chained
    if when == "before":
        deployment.call(engines[MODEL].die)
    else:
        die_with_it(engines[MODEL])
    answer = ask(deployment, stream=stream)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tollhouse-fallback"] == f"{MODEL} -> {OTHER}"
    assert f'"model":"{OTHER}"' in answer.text
    (event,) = deployment.events(1)
    assert (event["model"], event["engine_id"]) == (OTHER, f"{OTHER}-engine")
    assert event["routed"].startswith(f"fallback from {MODEL}; ")
    with deployment.services.database.read() as session:
        version = session.get(PriceVersionRow, event["price_version"])
        assert version is not None and version.model == OTHER
    assert event["output_tokens"] == 4


def test_a_tenant_may_turn_it_off(chained: tuple[Deployment, dict[str, FakeEngine]]) -> None:
    deployment, engines = chained
    deployment.call(engines[MODEL].die)
    url = f"{deployment.url}/admin/v1/tenant"
    change = {"settings": {"fallback": "off"}}
    assert httpx.patch(url, json=change, headers=deployment.headers, timeout=10).status_code == 200
    deadline = 50
    while (answer := ask(deployment)).status_code == 200 and deadline:
        deadline -= 1
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"


def test_when_nobody_answers_there_is_one_event_and_nothing_charged(
    chained: tuple[Deployment, dict[str, FakeEngine]],
) -> None:
    deployment, engines = chained
    for engine in engines.values():
        die_with_it(engine)
    answer = ask(deployment)
    assert answer.status_code == 503
    (event,) = deployment.events(1)
    assert (event["input_tokens"], event["output_tokens"], event["status"]) == (0, 0, 503)
    assert not deployment.services.spool.file.open_requests()


def test_a_refusal_at_the_next_model_closes_what_the_first_had_opened(
    chained: tuple[Deployment, dict[str, FakeEngine]],
) -> None:
    deployment, engines = chained
    die_with_it(engines[MODEL])
    deployment.call(engines[OTHER].die)
    assert ask(deployment).status_code == 503
    (event,) = deployment.events(1)
    assert (event["output_tokens"], event["finish_reason"]) == (0, "refused")
    assert not deployment.services.spool.file.open_requests()


def test_the_setting() -> None:
    assert read_fallbacks("") == {}
    assert read_fallbacks("a=b, c;b=c") == {"a": ("b", "c"), "b": ("c",)}
    assert read_fallbacks('{"a": ["b"]}') == {"a": ("b",)}
    for wrong in ("a", "a=", "{"):
        with pytest.raises(SettingError, match="TOLLHOUSE_FALLBACKS"):
            read_fallbacks(wrong)
