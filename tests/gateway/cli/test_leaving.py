"""A gateway that is asked to stop: balancers leave it first, nobody hangs on it, and what runs ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from tests.conftest import REDIS, need_redis
from tests.gateway.fake_upstream import upstream as running_upstream

ROOT = Path(__file__).parents[3]
STREAM_S = 4.0
pytestmark = pytest.mark.slow


class Slow(list[bytes]):
    """The reads of a stream that takes its time."""

    def __iter__(self) -> Iterator[bytes]:
        for each in super().__iter__():
            time.sleep(STREAM_S / len(self))
            yield each


def _event(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str
    key: str

    def ask(self, **body: Any) -> httpx.Response:
        """Whole and short, on a connection of its own."""
        asked = {"model": "slow", "messages": [{"role": "user", "content": "Go"}], **body}
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.post(
            f"{self.url}/v1/chat/completions", json=asked, headers=headers, timeout=30
        )


@contextmanager
def served(tmp_path: Path, upstream: str, **settings: str) -> Iterator[Served]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOLLHOUSE_")}
    own = {
        "TOLLHOUSE_DATA_DIR": str(tmp_path),
        "TOLLHOUSE_PORT": "0",
        "TOLLHOUSE_UPSTREAMS": json.dumps([{"url": upstream, "model": "slow"}]),
        "TOLLHOUSE_DRAIN_TIMEOUT_S": "20",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.cli.main", "serve"],
        cwd=ROOT, env=kept | own | settings, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    yield Served(process, json.loads(line)["url"], (tmp_path / "demo-key").read_text().strip())
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0


def _accepts(served_: Served) -> bool:
    with suppress(httpx.ConnectError):
        return httpx.get(f"{served_.url}/healthz", timeout=10).status_code == 200
    return False


def _answers(body: dict[str, Any]) -> Any:
    if body.get("stream"):
        words = [_event(f" {n}") for n in range(20)]
        return Slow([*words, _event("", "stop"), b"data: [DONE]\n\n"])
    message = {"role": "assistant", "content": "Hello"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_nobody_connects_to_a_gateway_that_drains_and_its_streams_end_well(
    tmp_path: Path, workers: str
) -> None:
    need_redis()
    counters = {"TOLLHOUSE_WORKERS": workers, "TOLLHOUSE_REDIS_URL": REDIS} if workers > "1" else {}
    with running_upstream() as upstream:
        upstream.answers["/v1/chat/completions"] = _answers
        with served(tmp_path, upstream.url, **counters) as gateway:
            assert gateway.ask().status_code == 200
            streamed: list[str] = []
            stream = Thread(target=lambda: streamed.append(gateway.ask(stream=True).text))
            stream.start()
            time.sleep(1.0)
            gateway.process.send_signal(signal.SIGTERM)
            time.sleep(1.0)
            started = time.monotonic()
            assert not _accepts(gateway), "a connection that nobody accepts"
            assert time.monotonic() - started < 5
            stream.join(30)
            assert streamed and streamed[0].rstrip().endswith("data: [DONE]")


def test_balancers_leave_before_the_gateway_does(tmp_path: Path) -> None:
    with running_upstream() as upstream:
        upstream.answers["/v1/chat/completions"] = _answers
        with served(tmp_path, upstream.url, TOLLHOUSE_DRAIN_DELAY_S="3") as gateway:
            assert httpx.get(f"{gateway.url}/readyz", timeout=10).status_code == 200
            gateway.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert httpx.get(f"{gateway.url}/readyz", timeout=10).status_code == 503
            answer = gateway.ask()
            assert answer.status_code == 200 and answer.headers["connection"] == "close"
            assert gateway.process.wait(60) == 0
            assert not _accepts(gateway)


def test_a_gateway_that_starts_refuses_connections_until_it_answers(tmp_path: Path) -> None:
    """It does not accept what it would answer seconds later."""
    with running_upstream() as upstream:
        upstream.answers["/v1/chat/completions"] = _answers
        with served(tmp_path, upstream.url) as first:
            port = first.url.rpartition(":")[2]
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli.main", "serve", "--port", port],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("TOLLHOUSE_")},
                "TOLLHOUSE_DATA_DIR": str(tmp_path),
                "TOLLHOUSE_UPSTREAMS": json.dumps([{"url": upstream.url, "model": "slow"}]),
            },
        )  # fmt: skip
        slowest, answered = 0.0, False
        deadline = time.monotonic() + 60
        while not answered and time.monotonic() < deadline:
            started = time.monotonic()
            with suppress(httpx.ConnectError):
                answered = httpx.get(f"{first.url}/healthz", timeout=30).status_code == 200
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
        assert answered and slowest < 2.0
