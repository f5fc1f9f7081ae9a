"""A request that hung or killed an engine is not tried again, and its adapter is put into quarantine."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from core.clock import FakeClock
from core.tenants.models import AuditEntry
from engine.demo.paths import MODEL_DIR
from gateway.catalog.catalog import NamedAdapter
from gateway.engines.local import EngineOptions, EngineProcess
from gateway.engines.routing.suspects import WINDOW_S, Suspects
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.hanging_engine import DIE, HANG, HANGS


class HangingOptions(EngineOptions):
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.gateway.hanging_engine", *super().command()[3:]]


@dataclass
class Site:
    deployment: Deployment
    engines: list[EngineProcess]

    def ask(self, first: int, **body: Any) -> httpx.Response:
        fields = {"model": MODEL, "prompt": [first, *range(5, 60)], "max_tokens": 4} | body
        url, headers = self.deployment.url, self.deployment.headers
        return httpx.post(f"{url}/v1/completions", json=fields, headers=headers, timeout=60)

    def starts(self) -> list[int]:
        return [each.starts for each in self.engines]

    def serves(self) -> None:
        until(lambda: all(p.client.healthy() for p in self.deployment.services.router.replicas()))


@contextmanager
def site(tmp_path: Path, count: int) -> Iterator[Site]:
    addresses = [f"ipc://{tmp_path}/{number}.sock" for number in range(count)]
    model = str(MODEL_DIR)
    engines = [
        EngineProcess(HangingOptions(model, each, tmp_path / f"{n}.log", extra=("--fake",)))
        for n, each in enumerate(addresses)
    ]
    entries = [
        {"url": each, "name": f"e{n}", "model": MODEL, "tokenizer": str(MODEL_DIR)}
        for n, each in enumerate(addresses)
    ]
    for each in engines:
        each.start()
    try:
        assert all(each.wait_ready(60) for each in engines)
        settings = {"upstreams": json.dumps(entries)}
        with running_deployment(tmp_path, engines=None, settings=settings) as deployment:
            made = Site(deployment, engines)
            made.serves()
            yield made
    finally:
        for each in engines:
            each.stop()


def until(what: Any, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_a_request_that_stops_an_engine_stops_no_second_one(tmp_path: Path) -> None:
    with site(tmp_path, 2) as made:
        assert made.ask(7).status_code == 200
        for starts, first in enumerate((HANG, DIE), start=3):
            answer = made.ask(first)
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["code"] == "engine_unavailable"
            assert answer.headers["x-should-retry"] == "false"
            assert made.ask(8).status_code == 200, "the other replica serves"
            until(lambda wanted=starts: sum(made.starts()) == wanted)
            made.serves()
            assert {made.ask(9).status_code for _ in range(4)} == {200}
            assert sum(made.starts()) == starts, "one was replaced, once"
        events = made.deployment.events(13)
        lost = [each for each in events if each["status"] >= 500]
        assert [each["output_tokens"] for each in lost] == [0, 0]


def test_the_only_engine_is_replaced_and_what_waited_is_answered(tmp_path: Path) -> None:
    with site(tmp_path, 1) as made:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(made.ask(HANG)))
        thread.start()
        until(lambda: made.deployment.services.router.of(MODEL)[0].under_way == 1)
        time.sleep(0.3)
        assert made.ask(8).status_code == 200, "it waited for the next process"
        thread.join(30)
        assert answers[0].status_code == 503
        assert made.starts() == [2]


def test_an_adapter_that_hangs_an_engine_is_quarantined(tmp_path: Path) -> None:
    with site(tmp_path, 1) as made:
        deployment = made.deployment
        assert upload(deployment, "evil").status_code == 201
        assert upload(deployment, "good", hangs=False).status_code == 201
        waiting = [threading.Thread(target=made.ask, args=(7,), kwargs={"model": "evil"})]
        waiting[0].start()
        answer = made.ask(7, model="evil")
        assert answer.status_code in (403, 503), answer.text
        waiting[0].join(60)
        refused = made.ask(7, model="evil")
        assert refused.status_code == 403, refused.text
        assert refused.json()["error"]["code"] == "adapter_quarantined"
        made.serves()
        assert made.ask(7, model="good").status_code == 200
        assert made.starts() == [2], "nobody tried it again"
        until(lambda: audited(deployment) == [("adapter.quarantine", "gateway")])
        again = upload(deployment, "other-name")
        assert again.status_code == 403, again.text
        listed = admin(deployment, "GET", "/admin/v1/adapters").json()["data"]
        (held,) = [each for each in listed if each["quarantined_at"]]
        assert held["name"] == "evil" and "stopped while it read" in held["quarantine_reason"]
        digest = held["digest"]
        assert admin(deployment, "POST", f"/admin/v1/adapters/{digest}/release").status_code == 403
        token = {"authorization": f"Bearer {deployment.services.operator_token}"}
        url = f"{deployment.url}/admin/v1/adapters/{digest}/release"
        assert httpx.post(url, headers=token, timeout=30).status_code == 200
        assert audited(deployment)[-1] == ("adapter.release", "operator")
        assert httpx.post(url, headers=token, timeout=30).status_code == 404


def upload(deployment: Deployment, name: str, *, hangs: bool = True) -> httpx.Response:
    config = {"r": 4, "lora_alpha": 8 + hangs, "peft_type": "LORA", HANGS: hangs}
    weights = MODEL_DIR.parent / "adapters" / "pirate" / "adapter_model.safetensors"
    archive = {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": weights.read_bytes(),
    }
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for each, data in archive.items():
            info = tarfile.TarInfo(each)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return httpx.post(
        f"{deployment.url}/admin/v1/adapters",
        data={"name": name, "base_model": MODEL},
        files={"file": ("a.tar", held.getvalue())},
        headers=deployment.headers,
        timeout=30,
    )


def admin(deployment: Deployment, method: str, path: str) -> httpx.Response:
    url = f"{deployment.url}{path}"
    return httpx.request(method, url, headers=deployment.headers, timeout=30)


def audited(deployment: Deployment) -> list[tuple[str, str]]:
    with deployment.services.database.read() as session:
        query = select(AuditEntry).order_by(AuditEntry.id)
        entries = [(each.action, each.actor) for each in session.scalars(query)]
    return [each for each in entries if each[0] in ("adapter.quarantine", "adapter.release")]


# The rules of suspicion, on a fake clock.

EVIL, GOOD = (
    NamedAdapter(name, "m", name * 16, f"/x/{name}", datetime(2026, 1, 1, tzinfo=UTC))
    for name in ("evil", "good")
)


def test_an_adapter_is_suspected_once_for_each_engine_that_stopped() -> None:
    held: list[str] = []
    suspects = Suspects(clock := FakeClock())
    suspects.on_quarantine = lambda adapter, reason: held.append(adapter.name)
    for _ in range(5):  # five of its requests were there
        suspects.lost(EVIL, "process-1")
    suspects.lost(GOOD, "process-1")
    assert not held
    suspects.lost(EVIL, "process-2")
    assert held == ["evil"]
    clock.advance(WINDOW_S + 1)
    suspects.lost(GOOD, "process-3")
    assert held == ["evil"], "the first death is forgotten by then"
    suspects.hung(GOOD)
    assert held == ["evil", "good"]


def test_a_stopped_engine_is_killed_and_replaced(tmp_path: Path) -> None:
    engine = EngineProcess(
        EngineOptions("fake", f"ipc://{tmp_path}/e.sock", tmp_path / "r.log", extra=("--fake",))
    )
    engine.silence_s = 3.0
    engine.start()
    try:
        assert engine.wait_ready(60)
        first = engine.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        until(lambda: engine.pid not in (None, first), 30)
        assert engine.wait_ready(60)
    finally:
        engine.stop()


def test_a_process_that_keeps_the_interpreter_s_lock_ends_and_says_where_it_hung() -> None:
    script = (
        "import time\n"
        "from engine.worker.watchdog import Watchdog\n"
        "from tests.gateway.hanging_engine import hang\n"
        "watchdog = Watchdog(time.monotonic, 60.0, blocked_s=1.0)\n"
        "hang()\n"
    )
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "in hang" in ended.stderr
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(("stall_s", "code"), [(0.5, 1), (0.0, 0)])
def test_a_loop_that_stands_still_ends_the_process(stall_s: float, code: int) -> None:
    script = (
        "import time\n"
        "from engine.worker.watchdog import Watchdog\n"
        "began = time.monotonic()\n"
        f"watchdog = Watchdog(lambda: began, {stall_s}, blocked_s=3.0)\n"
        "time.sleep(6)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert ended.returncode == code
