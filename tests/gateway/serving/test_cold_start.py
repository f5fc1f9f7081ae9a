"""What is not loaded yet is waited for, within bounds, and the waiting is honest."""

import time
from pathlib import Path
from typing import Any

import httpx

from core.ids import ADAPTER, new_id
from core.tenants.models import Adapter
from engine.demo.paths import MODEL_DIR
from gateway.catalog.catalog import ServedModel
from gateway.catalog.codec.tokenizing import load_codec
from gateway.engines.clients import Engines
from gateway.engines.fake import FakeEngine
from tests.gateway.deployment import MODEL, Deployment, running_deployment


def cold(load_s: float) -> tuple[FakeEngine, dict[str, Any]]:
    codec = load_codec(MODEL_DIR)
    engine = FakeEngine(vocab_size=codec.vocab_size, eos_token_ids=codec.eos_token_ids)
    return engine, {"engines": Engines({MODEL: [engine]}, [ServedModel(MODEL, codec, 512, 0)])}


def put_to_sleep(deployment: Deployment, engine: FakeEngine, load_s: float) -> None:
    engine.load_s = load_s
    engine._started = time.monotonic()


def ask(
    deployment: Deployment,
    *,
    stream: bool = False,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> Any:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "stream": stream,
    }
    url = f"{deployment.url}/v1/chat/completions"
    return httpx.post(
        url, json=body | more, headers={**deployment.headers, **(headers or {})}, timeout=30
    )


def test_a_stream_gets_keep_alives_until_the_model_is_there(tmp_path: Path) -> None:
    engine, wiring = cold(3.0)
    with running_deployment(tmp_path, **wiring) as deployment:
        deployment.services.pipeline.limits = type(deployment.services.pipeline.limits)(
            2**20, 60.0, keep_alive_s=0.2
        )
        put_to_sleep(deployment, engine, 3.0)
        ready = httpx.get(f"{deployment.url}/readyz", timeout=10)
        assert ready.status_code == 503, "no request is answered now"
        part = ready.json()["parts"]["engine fake"]
        assert not part["ready"] and part["unserved"] == [MODEL]
        assert part["state"] == "loading" and 0 < part["expected_in_s"] <= 3.0
        answer = ask(deployment, stream=True)
        assert answer.status_code == 200
        head, _, rest = answer.text.partition("data:")
        assert head.count(": keep-alive") >= 2, answer.text
        assert rest.rstrip().endswith("[DONE]")
        (event,) = deployment.events(1)
        assert (event["engine_id"], event["status"], event["output_tokens"]) == ("fake", 200, 4)


def test_a_whole_answer_waits_too(tmp_path: Path) -> None:
    engine, wiring = cold(0.5)
    with running_deployment(tmp_path, **wiring) as deployment:
        put_to_sleep(deployment, engine, 0.5)
        assert ask(deployment).status_code == 200
        assert deployment.events(1)[0]["status"] == 200


def test_who_waits_in_vain_is_told_how_long_it_takes(tmp_path: Path) -> None:
    engine, wiring = cold(20)
    with running_deployment(tmp_path, settings={"cold_start_s": 0.3}, **wiring) as deployment:
        put_to_sleep(deployment, engine, 20)
        answer = ask(deployment)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_loading"
        assert 18 <= float(answer.headers["retry-after"]) <= 20
        (event,) = deployment.events(1)
        assert (event["input_tokens"], event["output_tokens"], event["status"]) == (0, 0, 503)


def test_the_deadline_bounds_the_wait(tmp_path: Path) -> None:
    engine, wiring = cold(20)
    with running_deployment(tmp_path, **wiring) as deployment:
        put_to_sleep(deployment, engine, 20)
        answer = ask(deployment, headers={"x-request-timeout-ms": "300"})
        assert answer.json()["error"]["code"] == "deadline_exceeded"


def test_an_adapter_that_is_being_loaded_is_waited_for(tmp_path: Path) -> None:
    engine, wiring = cold(0)
    engine.adapter_load_s = 0.7
    with running_deployment(tmp_path, **wiring) as deployment:
        deployment.services.pipeline.limits = type(deployment.services.pipeline.limits)(
            2**20, 60.0, keep_alive_s=0.2
        )
        register(deployment, "wait", "ab" * 32)
        answer = ask(deployment, stream=True, model=f"{MODEL}:wait")
        assert answer.text.count(": keep-alive") >= 2, answer.text
        assert answer.text.rstrip().endswith("[DONE]")
        assert deployment.events(1)[0]["adapter_digest"] == "ab" * 32
        assert ": keep-alive" not in ask(deployment, stream=True, model=f"{MODEL}:wait").text


def test_an_adapter_that_takes_too_long_is_503_with_what_it_will_take(tmp_path: Path) -> None:
    engine, wiring = cold(0)
    engine.adapter_load_s = 20
    with running_deployment(tmp_path, settings={"cold_start_s": 0.3}, **wiring) as deployment:
        register(deployment, "slow", "cd" * 32)
        answer = ask(deployment, model=f"{MODEL}:slow")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "adapter_loading"
        assert float(answer.headers["retry-after"]) >= 1
        assert deployment.events(1)[0]["output_tokens"] == 0


def register(deployment: Deployment, name: str, digest: str) -> None:
    with deployment.services.database.transaction() as session:
        session.add(
            Adapter(
                id=new_id(ADAPTER),
                tenant_id=deployment.tenant_id,
                name=name,
                base_model=MODEL,
                digest=digest,
                path=f"/nowhere/{digest}",
                rank=8,
                bytes=1,
                created_at=deployment.services.clock.now(),
                created_by="system",
            )
        )
    deployment.services.adapters.refresh()
