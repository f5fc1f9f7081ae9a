"""A gateway that starts and is asked to stop: nobody hangs on it, and what runs ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from tests.conftest import REDIS, need_redis
from tests.gateway.fake_upstream import upstream as running_upstream
from tests.journeys.deployments import free_port
from tests.migrated import migrated

ROOT = Path(__file__).parents[3]
PROTECTS = ("gateway/cli/serve", "gateway/edge/listening.py")
pytestmark = pytest.mark.slow


class Held(list[bytes]):
    """The reads of a stream that stops in the middle until it may go on."""

    def __init__(self, reads: list[bytes]) -> None:
        super().__init__(reads)
        self.reached = Event()
        self.may_go_on = Event()

    def __iter__(self) -> Iterator[bytes]:
        for number, each in enumerate(super().__iter__()):
            if number == len(self) // 2:
                self.reached.set()
                assert self.may_go_on.wait(60)
            yield each


def _event(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str
    data: Path

    def ask(self, **body: Any) -> httpx.Response:
        """Whole and short, on a connection of its own."""
        asked = {"model": "slow", "messages": [{"role": "user", "content": "Go"}], **body}
        headers = {"authorization": f"Bearer {(self.data / 'demo-key').read_text().strip()}"}
        return httpx.post(
            f"{self.url}/v1/chat/completions", json=asked, headers=headers, timeout=30
        )

    def accepts(self) -> bool:
        """A connection that nobody accepts, or accepts and leaves without an answer, fails the test."""
        with suppress(httpx.ConnectError):
            return httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200
        return False

    def ready(self) -> int:
        return httpx.get(f"{self.url}/readyz", timeout=10).status_code


@contextmanager
def served(tmp_path: Path, upstream: str, **settings: str) -> Iterator[Served]:
    """From its first moment on."""
    migrated(f"sqlite:///{tmp_path}/tollhouse.db").close()  # test_serve.py starts from nothing
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOLLHOUSE_")}
    port = free_port()
    own = {
        "TOLLHOUSE_DATA_DIR": str(tmp_path),
        "TOLLHOUSE_PORT": str(port),
        "TOLLHOUSE_UPSTREAMS": json.dumps([{"url": upstream, "model": "slow"}]),
        "TOLLHOUSE_METRICS_TOKEN": "a-token-of-the-operator",
        "TOLLHOUSE_DRAIN_DELAY_S": "3",
        "TOLLHOUSE_DRAIN_TIMEOUT_S": "20",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.cli.main", "serve"],
        cwd=ROOT, env=kept | own | settings, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield Served(process, f"http://127.0.0.1:{port}", tmp_path)
    finally:
        process.kill()
        process.communicate(timeout=60)


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.05)


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.proof)])
def test_nobody_hangs_on_a_gateway_that_starts_or_drains_and_its_streams_end_well(
    tmp_path: Path, workers: str
) -> None:
    counters: dict[str, str] = {}
    if workers > "1":
        need_redis()
        counters = {"TOLLHOUSE_WORKERS": workers, "TOLLHOUSE_REDIS_URL": REDIS}
    held = Held([*(_event(f" {n}") for n in range(6)), _event("", "stop"), b"data: [DONE]\n\n"])
    message = {"role": "assistant", "content": "Hello"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    whole = {
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage
    }  # fmt: skip
    with running_upstream() as upstream:
        upstream.answers["/v1/chat/completions"] = lambda body: (
            held if body.get("stream") else whole
        )
        with served(tmp_path, upstream.url, **counters) as gateway:
            until(gateway.accepts)  # it does not accept what it would answer seconds later
            assert gateway.process.stdout is not None
            assert json.loads(gateway.process.stdout.readline())["url"] == gateway.url
            assert (
                gateway.ready() == gateway.ask().status_code == 200
            )  # also with a token of metrics
            assert httpx.get(f"{gateway.url}/metrics", timeout=10).status_code == 401
            streamed: list[str] = []
            stream = Thread(target=lambda: streamed.append(gateway.ask(stream=True).text))
            stream.start()
            assert held.reached.wait(30)
            gateway.process.send_signal(signal.SIGTERM)
            until(lambda: gateway.ready() == 503)  # balancers leave, and who still comes is served
            answer = gateway.ask()
            assert answer.status_code == 200 and answer.headers["connection"] == "close"
            until(lambda: not gateway.accepts())
            assert gateway.process.poll() is None and not streamed
            held.may_go_on.set()
            stream.join(30)
            assert streamed and streamed[0].rstrip().endswith("data: [DONE]")
            assert gateway.process.wait(60) == 0
