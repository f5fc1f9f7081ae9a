"""The router over two real engine processes: their own KV events lead requests, and a killed one is
replaced."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.demo.paths import MODEL_DIR
from gateway.admin.dashboard import make_backend
from gateway.engines.local import EngineOptions, EngineProcess
from tests.gateway.deployment import MODEL, Deployment, running_deployment

NAMES = ("left", "right")


def start(address: str, receipts: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "engine.worker.server", "--model", str(MODEL_DIR), "--fake"]
    command += ["--listen", address, "--receipts", str(receipts), "--heartbeat-s", "0.2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and "ready" in process.stdout.readline()
    return process


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Deployment, dict[str, subprocess.Popen[str]]]]:
    addresses = {name: f"ipc://{tmp_path}/{name}.sock" for name in NAMES}
    processes = {name: start(a, tmp_path / f"{name}.log") for name, a in addresses.items()}
    entries = ",".join(
        f'{{"url": "{address}", "name": "{name}", "model": "{MODEL}", "tokenizer": "{MODEL_DIR}"}}'
        for name, address in addresses.items()
    )
    try:
        with running_deployment(
            tmp_path, engines=None, settings={"upstreams": f"[{entries}]"}
        ) as deployment:
            until(lambda: all(p.client.healthy() for p in deployment.services.router.replicas()))
            yield deployment, processes
    finally:
        for process in processes.values():
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()


def until(what: Any, timeout_s: float = 15) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def ask(deployment: Deployment, ids: list[int], *, stream: bool = False) -> httpx.Response:
    body = {"model": MODEL, "prompt": ids, "max_tokens": 4, "stream": stream}
    return httpx.post(
        f"{deployment.url}/v1/completions", json=body, headers=deployment.headers, timeout=40
    )


def test_requests_follow_what_the_engines_say_they_hold(
    pair: tuple[Deployment, dict[str, subprocess.Popen[str]]],
) -> None:
    deployment, _ = pair
    dice, index = random.Random(3), deployment.services.router.index
    shared = {name: [dice.randrange(5, 900) for _ in range(640)] for name in "ab"}
    first = {}
    for number, (name, prompt) in enumerate(shared.items(), 1):
        assert ask(deployment, prompt).status_code == 200
        until(lambda number=number: sum(map(index.blocks, NAMES)) >= 40 * number)
        first[name] = deployment.events(number)[-1]["engine_id"]
    assert set(first.values()) == set(NAMES), "idle replicas share the tenants' prompts"
    for _ in range(3):
        for prompt in shared.values():
            answer = ask(deployment, [*prompt, *(dice.randrange(5, 900) for _ in range(20))])
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 640
    for event in deployment.events(8)[2:]:
        assert "640 tokens cached" in event["routed"]


def test_an_engine_killed_with_the_request_in_it_is_replaced_and_billed_once(
    pair: tuple[Deployment, dict[str, subprocess.Popen[str]]],
) -> None:
    deployment, processes = pair
    os.kill(processes["left"].pid, signal.SIGSTOP)
    answers: list[httpx.Response] = []
    prompt = list(range(5, 105))
    thread = threading.Thread(target=lambda: answers.append(ask(deployment, prompt)))
    thread.start()
    until(lambda: [p.under_way for p in deployment.services.router.replicas()] == [1, 0])
    processes["left"].kill()
    thread.join(30)
    (answer,) = answers
    assert answer.status_code == 200, answer.text
    (event,) = deployment.events(1)
    assert event["engine_id"] == "right"
    assert event["routed"].startswith("engine_unavailable at left; ")
    assert (event["input_tokens"], event["output_tokens"] + event["waived_tokens"]) == (100, 4)
    assert index_is_empty(deployment, "left")
    assert ask(deployment, prompt).status_code == 200, "and the next one does not wait for it"


def test_an_engine_that_hangs_with_its_socket_open_gets_nothing_new_and_loses_nothing(
    pair: tuple[Deployment, dict[str, subprocess.Popen[str]]],
) -> None:
    deployment, processes = pair
    left, right = deployment.services.router.replicas()
    prompt = list(range(5, 105))
    os.kill(processes["left"].pid, signal.SIGSTOP)
    answers: list[httpx.Response] = []
    ways = [False, True, False]
    threads = [
        threading.Thread(target=lambda s=s: answers.append(ask(deployment, prompt, stream=s)))
        for s in ways
    ]
    for thread in threads:
        thread.start()
    until(lambda: left.under_way and left.under_way + right.under_way + len(answers) == 3)
    for thread in threads:
        thread.join(25)  # far less than the 30 s after which silence is taken for death
    assert [answer.status_code for answer in answers] == [200] * 3, "what waited went to the other"
    assert left.silent and left.state() == "silent" and left.client.healthy()
    assert {ask(deployment, prompt).status_code for _ in range(5)} == {200}
    os.kill(processes["left"].pid, signal.SIGCONT)
    until(lambda: not left.silent and left.serves() and left.under_way == 0)
    events = deployment.events(8)
    assert len(events) == 8
    assert {event["engine_id"] for event in events} == {"right"}, "nothing of the left's is billed"
    assert {(e["input_tokens"], e["output_tokens"] + e["waived_tokens"]) for e in events} == {
        (100, 4)
    }
    assert any(e["routed"].startswith("engine_unavailable at left; ") for e in events)
    until(lambda: ask(deployment, prompt).status_code == 200 and left.client.last_output() > 0)


def index_is_empty(deployment: Deployment, name: str) -> bool:
    return deployment.services.router.index.blocks(name) == 0


def test_the_pages_see_the_engines_their_adapters_and_who_is_drained(
    pair: tuple[Deployment, dict[str, subprocess.Popen[str]]], tmp_path: Path
) -> None:
    deployment, _ = pair
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text('{"r": 4}')
    (path / "adapter_model.safetensors").write_bytes(b"weights")
    left = next(p for p in deployment.services.router.replicas() if p.name == "left")
    loading = asyncio.run_coroutine_threadsafe(
        left.client.load_adapter(str(path), ""), deployment.loop
    )
    digest = loading.result(20).digest
    time.sleep(1.5)  # heartbeats that have nothing new to tell of it
    backend = make_backend(deployment.services)
    assert backend.residency() == {digest: {"host": 1}}
    assert {each.state for each in backend.engines()} == {"healthy"}
    left.draining = True
    states = {each.engine_id: each.state for each in backend.engines()}
    assert states == {"left": "draining", "right": "healthy"}


def test_the_only_engine_killed_with_the_request_in_it_answers_when_it_is_back(
    tmp_path: Path,
) -> None:
    address = f"ipc://{tmp_path}/only.sock"
    options = EngineOptions(str(MODEL_DIR), address, tmp_path / "r.log", extra=("--fake",))
    engine = EngineProcess(options)
    engine.start()
    assert engine.wait_ready(60), engine.problem
    entry = f'[{{"url": "{address}", "model": "{MODEL}", "tokenizer": "{MODEL_DIR}"}}]'
    try:
        with running_deployment(
            tmp_path, engines=None, settings={"upstreams": entry}
        ) as deployment:
            (place,) = deployment.services.router.replicas()
            until(place.client.healthy)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGSTOP)
            answers: list[httpx.Response] = []
            prompt = list(range(5, 105))
            thread = threading.Thread(target=lambda: answers.append(ask(deployment, prompt)))
            thread.start()
            until(lambda: place.under_way == 1)
            os.kill(engine.pid, signal.SIGKILL)
            thread.join(40)
            assert answers[0].status_code == 200, answers[0].text
            (event,) = deployment.events(1)
            assert event["routed"].startswith("engine_unavailable at ")
            assert (event["input_tokens"], event["output_tokens"] + event["waived_tokens"]) == (
                100,
                4,
            )
    finally:
        engine.stop()
