"""The same product in production: PostgreSQL, Redis, RabbitMQ, engines and workers elsewhere, kill -9."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.conftest import RABBITMQ, REDIS, need_rabbitmq, need_redis
from tests.journeys.deployments import (
    ROOT,
    Command,
    audit_when_settled,
    free_port,
    reap,
    serve,
    start_engine,
    start_worker,
    streams,
    sweep,
)
from tests.journeys.test_kill import check, events_of, in_the_middle

PROTECTS = (
    "gateway/metering",
    "gateway/engines/remote.py",
    "gateway/engines/routing",
    "core/celery_queue.py",
    "core/counters_redis.py",
    "engine/worker",
    "billing/usage",
    "billing/rating",
    "billing/ledger",
)


@pytest.mark.proof
def test_a_killed_worker_on_postgresql_loses_and_doubles_nothing(
    tmp_path: Path, postgres_url: str
) -> None:
    need_redis()
    socket_file = f"ipc://{tmp_path}/engine.sock"
    engine = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "gateway.cli.main",
            "engine",
            *("--model", str(ROOT / "engine/demo/weights"), "--listen", socket_file),
            *("--receipts", str(tmp_path / "receipts.log")),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert engine.stdout is not None
    try:
        assert json.loads(engine.stdout.readline())["event"] == "ready"
        command = Command(
            tmp_path,
            {
                "TOLLHOUSE_DATABASE_URL": postgres_url,
                "TOLLHOUSE_REDIS_URL": REDIS,
                "TOLLHOUSE_WORKERS": "2",
                "TOLLHOUSE_UPSTREAMS": socket_file,
            },
        )
        deployment = serve(command)
        try:
            workers = deployment.children()
            assert len(workers) == 2
            seen = in_the_middle(deployment, lambda: os.kill(workers[0], signal.SIGKILL))
            report = audit_when_settled(command)
            assert (report["lost"], report["duplicated"], report["ledger_error"]) == (0, 0, "0")
            check(seen, events_of(postgres_url))
            deadline = time.monotonic() + 60
            while asyncio.run(streams(deployment, 2, max_tokens=4))[0].usage is None:
                assert time.monotonic() < deadline
        finally:
            assert deployment.stop() == 0
    finally:
        engine.terminate()
        engine.wait(60)
        engine.stdout.close()


@pytest.mark.proof
@pytest.mark.timeout(500)
def test_the_deployment_survives_the_death_of_an_engine_a_gateway_and_a_worker(
    tmp_path: Path, postgres_url: str
) -> None:
    need_redis()
    need_rabbitmq()
    places = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    command = Command(
        tmp_path,
        {
            "TOLLHOUSE_DATABASE_URL": postgres_url,
            "TOLLHOUSE_REDIS_URL": REDIS,
            "TOLLHOUSE_BROKER_URL": RABBITMQ,
            "TOLLHOUSE_WORKERS": "4",
            "TOLLHOUSE_UPSTREAMS": " ".join(places),
        },
    )
    prefix = f"test-{uuid.uuid4().hex[:10]}"
    engines = [start_engine(command, place) for place in places]
    worker = None
    try:
        deployment = serve(command)  # it makes the schema that the worker needs
        worker = start_worker(command, prefix)
        try:

            def _strike() -> None:
                engines[0].kill()
                time.sleep(6.0)  # until the gateways have missed the engine's heartbeats
                os.kill(deployment.children()[0], signal.SIGKILL)
                os.killpg(worker.pid, signal.SIGKILL)

            seen = in_the_middle(deployment, _strike)
            assert any(each.chunks for each in seen)
            reap(engines[0])
            engines[0] = start_engine(command, places[0])
            reap(worker)
            worker = start_worker(command, prefix)
            report = audit_when_settled(command)
            assert (report["lost"], report["duplicated"], report["ledger_error"]) == (0, 0, "0")
            events = events_of(postgres_url)
            # Where a request's engine and its gateway both died, nobody is left who counted: it is
            # closed at zero, in the customer's favour.
            unseen = {key for key, event in events.items() if event["settled_by"] == "expiry"}
            assert all(events[key]["output_tokens"] == 0 for key in unseen)
            check([each for each in seen if each.request_id not in unseen], events)
            deadline = time.monotonic() + 60
            while asyncio.run(streams(deployment, 2, max_tokens=4))[0].usage is None:
                assert time.monotonic() < deadline
        finally:
            assert deployment.stop() == 0
    finally:
        if worker is not None:
            os.killpg(worker.pid, signal.SIGKILL)
            reap(worker)
        for engine in engines:
            engine.terminate()
            reap(engine)
        sweep(prefix, RABBITMQ)
