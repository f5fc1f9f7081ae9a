"""The scheduler and a worker in production: their metrics are scraped, and their death is seen."""

import json
import os
import re
import secrets
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from core.queue import QUEUES
from core.settings import Settings
from tests.conftest import RABBITMQ, REDIS, need_rabbitmq, need_redis
from tests.journeys.deployments import (
    Command,
    RunningGateway,
    free_port,
    reap,
    serve,
    start_worker,
    sweep,
)
from tests.migrated import migrated

PROTECTS = ("gateway/admin/worker", "core/celery_queue.py", "core/worker_liveness.py")
TOKEN = secrets.token_hex(16)


def wait(holds: Callable[[], bool], log: Path, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.5)


def metrics(url: str) -> str:
    try:
        answer = httpx.get(f"{url}/metrics", timeout=5)
    except httpx.HTTPError:
        return ""
    return answer.text if answer.status_code == 200 else ""


def tasks_by_doctor(command: Command) -> tuple[str, str]:
    done = command.run("doctor", "--json")
    parts: list[dict[str, Any]] = json.loads(done.stdout)["parts"]
    (found,) = [each for each in parts if each["part"] == "tasks"]
    return found["health"], found["says"]


def health_page(gateway: RunningGateway) -> str:
    headers = {"origin": gateway.url}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=30) as client:
        assert client.post("/dashboard/sign-in", data={"secret": TOKEN}).status_code == 303
        return client.get("/dashboard/operator/health?format=csv").text


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_the_scheduler_has_metrics_and_its_death_is_seen(tmp_path: Path, postgres_url: str) -> None:
    need_redis()
    need_rabbitmq()
    command = Command(
        tmp_path,
        {
            "TOLLHOUSE_DATABASE_URL": postgres_url,
            "TOLLHOUSE_REDIS_URL": REDIS,
            "TOLLHOUSE_BROKER_URL": RABBITMQ,
            "TOLLHOUSE_ADMIN_TOKEN": TOKEN,
        },
    )
    prefix = f"test-{uuid.uuid4().hex[:10]}"
    gateway = serve(command)
    port, log = free_port(), tmp_path / "worker.txt"
    beat = start_worker(command, prefix, "--concurrency", "1", metrics_port=port)
    try:
        url = f"http://127.0.0.1:{port}"
        heartbeat = re.compile(r'tollhouse_task_seconds_count\{task="core.heartbeat_(\w+)"\} ')
        wait(lambda: set(heartbeat.findall(metrics(url))) == set(QUEUES), log)
        assert httpx.get(f"{url}/healthz", timeout=5).status_code == 200
        assert tasks_by_doctor(command) == ("good", "every queue has a worker")
        assert "tasks,good," in health_page(gateway)
        os.killpg(beat.pid, signal.SIGKILL)
        reap(beat)
        wait(lambda: metrics(url) == "", log, 30)  # its process ends with the worker
        with psycopg.connect(postgres_url) as connection:  # two minutes later
            connection.execute("update queue_heartbeats set at = at - interval '10 minutes'")
        state, said = tasks_by_doctor(command)
        assert state == "bad" and all(f"{queue} silent for" in said for queue in QUEUES), said
        assert "tasks,bad,no worker: " in health_page(gateway).replace('"', "")
    finally:
        if beat.poll() is None:
            os.killpg(beat.pid, signal.SIGKILL)
            reap(beat)
        gateway.stop()
        sweep(prefix, RABBITMQ)


@pytest.mark.timeout(200)
def test_a_worker_says_what_it_is_ready_for(tmp_path: Path) -> None:
    need_rabbitmq()
    command = Command(tmp_path, {"TOLLHOUSE_BROKER_URL": RABBITMQ})
    migrated(Settings(data_dir=tmp_path).effective_database_url).close()
    prefix, port = f"test-{uuid.uuid4().hex[:10]}", free_port()
    worker = start_worker(command, prefix, "--concurrency", "1", metrics_port=port)
    log, url = tmp_path / "worker.txt", f"http://127.0.0.1:{port}"
    silence = re.compile(r'^tollhouse_worker_silence_seconds\{part="(\w+)"\} ', re.MULTILINE)
    try:
        wait(lambda: set(silence.findall(metrics(url))) == {"tasks", "schedule"}, log)
        began = time.monotonic()
        # A ping is taken: the age is less than the time that has passed.
        wait(
            lambda: parts(url)["tasks"]["silent_s"] < time.monotonic() - began - 3,
            log,
        )
        ready = httpx.get(f"{url}/readyz", timeout=5)
        assert ready.status_code == 200, ready.text
        assert {
            name: part["ready"] for name, part in ready.json()["parts"].items()
        } == dict.fromkeys(("broker", "tasks", "schedule", "database"), True)
        assert httpx.get(f"{url}/healthz", timeout=5).status_code == 200
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        reap(worker)
        sweep(prefix, RABBITMQ)


def parts(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/readyz", timeout=5).json()["parts"]
    return found
