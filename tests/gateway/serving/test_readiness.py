"""`/readyz` lists what a gateway depends on, each with its state, and answers 200 only while a request
of some model can be answered; which parts count is a setting. One row a fault."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.errors import SettingError
from core.settings import Settings, load_settings
from gateway.metering import spool
from tests.gateway.admission.test_redis_down import Server
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.small_disk import fill, free, mounted

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def ready(deployment: Deployment) -> httpx.Response:
    operator = {"authorization": f"Bearer {deployment.services.operator_token}"}
    return httpx.get(f"{deployment.url}/readyz", headers=operator, timeout=60)


def until(deployment: Deployment, status: int) -> dict[str, Any]:
    """The parts, once `/readyz` answers so."""
    deadline = time.monotonic() + 60
    while (answer := ready(deployment)).status_code != status:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)
    parts: dict[str, Any] = answer.json()["parts"]
    return parts


def chat(deployment: Deployment) -> httpx.Response:
    url = f"{deployment.url}/v1/chat/completions"
    return httpx.post(url, json=BODY, headers=deployment.headers, timeout=60)


@contextmanager
def _engine_away(deployment: Deployment) -> Iterator[None]:
    deployment.call(deployment.engine.die)
    yield
    deployment.engine._alive = True


@contextmanager
def _engine_hangs(deployment: Deployment) -> Iterator[None]:
    (replica,) = deployment.services.router.replicas()
    replica.draining = True
    yield
    replica.draining = False


@contextmanager
def _draining(deployment: Deployment) -> Iterator[None]:
    deployment.services.pipeline.draining = True
    yield
    deployment.services.pipeline.draining = False


@contextmanager
def _database_away(deployment: Deployment) -> Iterator[None]:
    """Each new connection is to a file that is none."""
    path = Path(deployment.services.settings.effective_database_url.removeprefix("sqlite:///"))
    hidden = path.with_suffix(".hidden")
    database = deployment.services.access_database
    path.rename(hidden)
    path.mkdir()
    database.db_engine.dispose()
    yield
    path.rmdir()
    hidden.rename(path)


@dataclass(frozen=True)
class Fault:
    begin: Callable[[Deployment], AbstractContextManager[None]]
    part: str  # which is not ready
    serves: bool  # whether chats are answered meanwhile


FAULTS = {
    "engine away": Fault(_engine_away, "serving", False),
    "engine drained": Fault(_engine_hangs, "serving", False),
    "draining": Fault(_draining, "gateway", False),
    "database away": Fault(_database_away, "database", True),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen_and_named_and_its_end_too(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    settings = {"ready_needs": "disk,serving,database"}
    with running_deployment(tmp_path, settings=settings) as deployment:
        parts = until(deployment, 200)
        assert all(part["ready"] for part in parts.values()), parts
        assert parts["serving"]["models"] == [MODEL]
        assert chat(deployment).is_success
        with fault.begin(deployment):
            parts = until(deployment, 503)
            assert not parts[fault.part]["ready"]
            assert chat(deployment).is_success is fault.serves
        until(deployment, 200)
        assert chat(deployment).is_success


@pytest.mark.parametrize(("needs", "status"), [("disk,serving", 200), ("serving,database", 503)])
def test_which_parts_count_is_a_setting(tmp_path: Path, needs: str, status: int) -> None:
    with running_deployment(tmp_path, settings={"ready_needs": needs}) as deployment:
        until(deployment, 200)
        with _database_away(deployment):
            deadline = time.monotonic() + 60
            while ready(deployment).json()["parts"]["database"]["ready"]:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert ready(deployment).status_code == status


def test_an_unknown_part_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLLHOUSE_READY_NEEDS", "disk,moon")
    with pytest.raises(SettingError, match=r"TOLLHOUSE_READY_NEEDS.*'moon' is none of disk"):
        load_settings()
    assert Settings(ready_needs="database, redis").ready_needs == ("database", "redis")


@pytest.mark.parametrize("mode", ["closed", "local"])
def test_redis_counts_where_limits_fail_closed(tmp_path: Path, mode: str) -> None:
    server = Server()
    settings = {"redis_url": server.url, "limits_when_redis_down": mode}
    try:
        with running_deployment(tmp_path, settings=settings) as deployment:
            until(deployment, 200)
            assert chat(deployment).is_success
            server.pause()
            chat(deployment)
            parts = until(deployment, 503 if mode == "closed" else 200)
            assert not parts["redis"]["ready"] and mode in parts["redis"]["state"]
            os.kill(server.process.pid, signal.SIGCONT)
            until(deployment, 200)
    finally:
        server.resume()
        server.kill()


def test_a_full_disk_is_seen_and_what_cannot_be_stored_is_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(tmp_path / "disk", 48) as is_small:
        if not is_small:
            pytest.skip("this user may not mount a file system: run as root")
        # The spool keeps less for itself than it does of a real disk.
        monkeypatch.setattr(spool, "RESERVE", 4 << 20)
        with running_deployment(tmp_path / "disk") as deployment:
            deployment.services.spool.file._reserve = 4 << 20
            until(deployment, 200)
            fill(tmp_path / "disk")
            try:
                parts = until(deployment, 503)
                assert not parts["disk"]["ready"] and not parts["serving"]["ready"]
                assert chat(deployment).json()["error"]["code"] == "spool_unavailable"
                sent = {"file": ("a.jsonl", b"{}" * 100_000)}
                stored = httpx.post(
                    f"{deployment.url}/v1/files",
                    data={"purpose": "batch"},
                    files=sent,
                    headers=deployment.headers,
                    timeout=60,
                )
                assert stored.status_code == 503, stored.text
                assert stored.json()["error"]["code"] == "storage_unavailable"
            finally:
                free(tmp_path / "disk")
            until(deployment, 200)
            assert chat(deployment).is_success
