"""The same house on PostgreSQL and Redis: two gateway workers, an engine elsewhere, kill -9."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REDIS, need_redis
from tests.journeys.houses import ROOT, Command, audit_when_settled, serve, streams
from tests.journeys.test_kill import check, events_of, in_the_middle


@pytest.mark.slow
def test_a_killed_worker_on_postgresql_loses_and_doubles_nothing(
    tmp_path: Path, postgres_url: str
) -> None:
    need_redis()
    socket_file = f"ipc://{tmp_path}/engine.sock"
    engine = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "gateway.cli",
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
        house = serve(command)
        try:
            workers = house.children()
            assert len(workers) == 2
            seen = in_the_middle(house, lambda: os.kill(workers[0], signal.SIGKILL))
            report = audit_when_settled(command)
            assert (report["lost"], report["duplicated"], report["ledger_error"]) == (0, 0, "0")
            check(seen, events_of(postgres_url))
            deadline = time.monotonic() + 60
            while asyncio.run(streams(house, 2, max_tokens=4))[0].usage is None:
                assert time.monotonic() < deadline
        finally:
            assert house.stop() == 0
    finally:
        engine.terminate()
        engine.wait(60)
        engine.stdout.close()
