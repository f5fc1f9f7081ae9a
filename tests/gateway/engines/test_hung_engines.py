"""Replicas that are connected and yet do nothing: what waits there goes to another, billed once."""

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY

from engine.demo.paths import MODEL_DIR
from engine.worker.heartbeat import Liveness
from gateway.catalog.catalog import ServedModel
from gateway.catalog.codec.tokenizing import load_codec
from gateway.catalog.upstreams import Upstream
from gateway.engines import openai
from gateway.engines.clients import Engines
from gateway.engines.fake import FakeEngine
from gateway.engines.openai import OpenAIEngine
from gateway.engines.remote import RemoteEngine
from gateway.engines.routing import hung_engines
from tests.gateway.deployment import MODEL, Deployment, running_deployment


@pytest.fixture
def two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Deployment, list[FakeEngine]]]:
    monkeypatch.setattr(hung_engines, "_STUCK_LEAST_S", 0.2)
    monkeypatch.setattr(hung_engines, "_STUCK_FACTOR", 1.0)
    codec = load_codec(MODEL_DIR)
    engines = [
        FakeEngine(engine_id=name, vocab_size=codec.vocab_size, eos_token_ids=codec.eos_token_ids)
        for name in ("left", "right")
    ]
    model = ServedModel(MODEL, codec, 512, 0)
    with running_deployment(
        tmp_path, engines=Engines({MODEL: list(engines)}, [model])
    ) as deployment:
        yield deployment, engines


def test_one_that_lives_and_answers_nobody_is_left_alone(
    two: tuple[Deployment, list[FakeEngine]],
) -> None:
    deployment, (left, right) = two

    async def _hang(request: Any, mailbox: Any) -> None:
        await asyncio.sleep(60)

    left._run = _hang  # type: ignore[method-assign]
    body = {"model": MODEL, "prompt": list(range(5, 45)), "max_tokens": 4, "stream": True}
    url = f"{deployment.url}/v1/completions"
    first = httpx.post(url, json=body, headers=deployment.headers, timeout=30)
    assert first.status_code == 200 and "[DONE]" in first.text
    assert len(left.submitted) == len(right.submitted) == 1
    assert left._aborted == {left.submitted[0].request_id}, "it is told to stop"
    place = deployment.services.router.of(MODEL)[0]
    assert place.breaker.state == "open" or place.breaker.state == "half_open"
    (event,) = deployment.events(1)
    assert event["engine_id"] == "right"
    assert event["output_tokens"] + event["waived_tokens"] == 4


def test_a_model_without_an_engine_is_shown_and_logged_once(
    two: tuple[Deployment, list[FakeEngine]], caplog: pytest.LogCaptureFixture
) -> None:
    _, engines = two

    def _unserved() -> float | None:
        return REGISTRY.get_sample_value("tollhouse_model_unserved", {"model": MODEL})

    def _until(value: float) -> None:
        deadline = time.monotonic() + 60
        while _unserved() != value:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def _leave_and_return() -> None:
        for engine in engines:
            engine.load_s = 1e9  # not healthy
        _until(1)
        for engine in engines:
            engine.load_s = 0.0
        _until(0)

    _leave_and_return()  # now the state is known, and the gauge is not that of another test
    caplog.clear()
    _leave_and_return()
    assert caplog.text.count("served by no engine") == 1


def test_the_only_replica_keeps_what_it_has(two: tuple[Deployment, list[FakeEngine]]) -> None:
    deployment, (left, right) = two
    right.hangs = True
    deadline = time.monotonic() + 60
    while not deployment.services.router.of(MODEL)[1].silent:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    left.token_delay_s = 0.8  # slow to its first token, and nobody else to take it
    body = {"model": MODEL, "prompt": list(range(5, 45)), "max_tokens": 1}
    answer = httpx.post(
        f"{deployment.url}/v1/completions", json=body, headers=deployment.headers, timeout=30
    )
    assert answer.status_code == 200
    assert not right.submitted


async def test_a_server_that_takes_calls_and_answers_none_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai, "_SILENT_AFTER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        engine = OpenAIEngine(Upstream(f"http://127.0.0.1:{deaf.getsockname()[1]}"), "m")
        await engine.start()
        try:
            async with asyncio.timeout(60):
                while not engine.silent():
                    await asyncio.sleep(0.02)
            assert engine.healthy()
        finally:
            await engine.close()


def test_silence_is_measured_by_the_pauses_that_are_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    liveness = Liveness(expected_s=1.0)
    liveness.start()
    now[0] += 2.4
    assert not liveness.silent
    now[0] += 0.2
    assert liveness.silent
    now[0] += 3.4  # a long step: six seconds
    liveness.received(output=True)
    assert not liveness.silent and liveness.output_at == now[0]
    now[0] += 14
    assert not liveness.silent, "such steps are usual with it"
    now[0] += 1.1
    assert liveness.silent
    for _ in range(60):
        liveness.received(output=False)
    now[0] += 1.6
    assert liveness.silent, "and after many quick ones they are not"


def test_one_that_disconnects_does_not_count_as_responding_again(
    two: tuple[Deployment, list[FakeEngine]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment, (_, right) = two
    replica = deployment.services.router.of(MODEL)[1]
    right.hangs = True
    deadline = time.monotonic() + 60
    while not replica.silent:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with caplog.at_level("WARNING", "tollhouse.routing"):
        monkeypatch.setattr(right, "healthy", lambda: False)  # its connection is lost
        while replica.silent:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert "responds again" not in caplog.text


async def test_receipts_of_an_engine_that_is_away_are_not_acknowledged_aloud(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = RemoteEngine("away", "tcp://127.0.0.1:1")
    with caplog.at_level("INFO"):
        await engine.acknowledge(["req_1"])
    assert caplog.text == ""
