"""Gateway processes that keep to a core each, as the system sees them, and what they start."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from engine.demo.paths import MODEL_DIR
from gateway.edge import cpu_affinity
from tests.conftest import REDIS, need_redis
from tests.journeys.deployments import ROOT, Command, RunningGateway, serve

PROTECTS = (
    "gateway/edge/cpu_affinity.py",
    "gateway/edge/listening.py",
    "gateway/metering/batch_shippers.py",
)
pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system gives no cores to choose"
)
ALL = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
PIN = {"TOLLHOUSE_PIN_WORKERS": "true"}


def from_the_last(place: int) -> set[int]:
    return {sorted(ALL)[-1 - place % len(ALL)]}


def test_a_process_keeps_to_its_core_and_its_children_do_not() -> None:
    look = "import os, sys; print(sorted(os.sched_getaffinity(0)))"
    script = (
        "import os, subprocess, sys, threading\n"
        "from gateway.edge import cpu_affinity as cores\n"
        "cores.pin_to_core(int(sys.argv[1]))\n"
        "print(sorted(os.sched_getaffinity(0)), flush=True)\n"
        f"run = lambda: subprocess.run([sys.executable, '-c', {look!r}], check=True)\n"
        "def inside():\n"
        "    with cores.all_cores_for_children():\n"
        "        run()\n"
        "thread = threading.Thread(target=inside)\n"
        "thread.start()\n"
        "thread.join()\n"
        "run()\n"
        "print(sorted(os.sched_getaffinity(0)))\n"
    )
    for place in range(len(ALL) + 1):
        said = subprocess.run(
            [sys.executable, "-c", script, str(place)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.split("\n")
        own = str(sorted(from_the_last(place)))
        assert said[:4] == [own, str(sorted(ALL)), own, own]


def test_what_is_not_pinned_leaves_the_cores_alone() -> None:
    with cpu_affinity.all_cores_for_children():
        assert os.sched_getaffinity(0) == ALL
    assert os.sched_getaffinity(0) == ALL


def test_a_system_without_cores_to_choose_says_so_and_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    cpu_affinity.pin_to_core(0)
    with cpu_affinity.all_cores_for_children():
        pass
    assert "TOLLHOUSE_PIN_WORKERS" in caplog.text


@pytest.mark.proof
def test_every_thread_of_a_worker_keeps_to_its_place_also_of_one_that_was_started_again(
    tmp_path: Path,
) -> None:
    need_redis()
    command = Command(
        tmp_path,
        {
            **PIN,
            "TOLLHOUSE_WORKERS": "2",
            "TOLLHOUSE_REDIS_URL": REDIS,
            "TOLLHOUSE_UPSTREAMS": f'[{{"url": "http://127.0.0.1:9", "model": "m", '
            f'"tokenizer": "{MODEL_DIR}"}}]',
        },
    )
    process = command.start("serve")
    deployment = RunningGateway(process, "", "")
    try:
        until(lambda: len(workers_of(deployment)) == 2)
        assert process.pid not in workers_of(deployment)
        assert cores_of(process.pid) == ALL
        in_place = {"0": from_the_last(0), "1": from_the_last(1)}
        until(lambda: places(deployment) == in_place)
        first = workers_of(deployment)[0]
        os.kill(first, signal.SIGKILL)
        until(lambda: len(workers_of(deployment)) == 2 and first not in workers_of(deployment))
        until(lambda: places(deployment) == in_place)
    finally:
        deployment.stop()


@pytest.mark.proof
def test_one_process_keeps_to_the_last_core_and_its_engine_has_all(tmp_path: Path) -> None:
    deployment = serve(Command(tmp_path, PIN))
    try:
        assert cores_of(deployment.process.pid) == from_the_last(0)
        engines = [pid for pid in deployment.children() if "engine.worker.server" in words_of(pid)]
        assert len(engines) == 1
        assert cores_of(engines[0]) == ALL
        os.kill(engines[0], signal.SIGKILL)
        until(
            lambda: any(
                pid != engines[0] and "engine.worker.server" in words_of(pid)
                for pid in deployment.children()
            )
        )
        again = next(
            pid for pid in deployment.children() if "engine.worker.server" in words_of(pid)
        )
        assert cores_of(again) == ALL
    finally:
        assert deployment.stop() == 0


def workers_of(deployment: RunningGateway) -> list[int]:
    return sorted(
        pid for pid in deployment.children() if "gateway.cli.serve.worker_process" in words_of(pid)
    )


def places(deployment: RunningGateway) -> dict[str, set[int]]:
    return {words_of(pid).split("\0")[-2]: cores_of(pid) for pid in workers_of(deployment)}


def cores_of(pid: int) -> set[int]:
    """Of all its threads together."""
    found: set[int] = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):  # it ended meanwhile
            found |= os.sched_getaffinity(int(thread))
    return found


def words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def until(what: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
