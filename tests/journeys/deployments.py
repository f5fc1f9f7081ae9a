"""Whole deployments as operators run them: real processes, started, killed and started again."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]


@dataclass
class Command:
    """`tollhouse …` with its own environment."""

    data_dir: Path
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TOLLHOUSE_")}
        own = {
            "TOLLHOUSE_DATA_DIR": str(self.data_dir),
            "TOLLHOUSE_PORT": "0",
            "TOLLHOUSE_DRAIN_TIMEOUT_S": "2",
            "TOLLHOUSE_DEMO_TENANT": "always",
            "OMP_NUM_THREADS": "1",
        }
        return kept | own | self.settings

    def run(self, *arguments: str, timeout_s: float = 200) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "gateway.cli.main", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        log = (self.data_dir / "log.txt").open("a")
        with log:
            return subprocess.Popen(
                [sys.executable, "-m", "gateway.cli.main", *arguments],
                cwd=ROOT,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )


@dataclass
class RunningGateway:
    process: "subprocess.Popen[str]"
    url: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def children(self) -> list[int]:
        listed = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for path in listed for pid in path.read_text().split()]

    def kill(self) -> None:
        self.process.kill()
        self._reap()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self._reap()
        return self.process.returncode

    def _reap(self) -> None:
        self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()


def serve(command: Command) -> RunningGateway:
    process = command.start("serve")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, (command.data_dir / "log.txt").read_text()[-3000:]
    ready = json.loads(line)
    assert ready["event"] == "ready"
    return RunningGateway(
        process, ready["url"], (command.data_dir / "demo-key").read_text().strip()
    )


@dataclass
class StreamResult:
    """What one client saw of its stream."""

    request_id: str = ""
    chunks: int = 0
    tokens: int = 0
    last: int = 0  # tokens of the last event that had some
    usage: dict[str, int] | None = None
    failed: bool = False


async def streams(
    deployment: RunningGateway,
    count: int,
    *,
    max_tokens: int = 400,
    heard: Callable[[StreamResult], None] = lambda _: None,
) -> list[StreamResult]:
    """So many streams at once, each read to whatever end it comes to; `heard` after each line."""
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(
        base_url=deployment.url, headers=deployment.headers, timeout=60, limits=limits
    ) as client:
        every = (_stream(client, i, max_tokens, heard) for i in range(count))
        return list(await asyncio.gather(*every))


async def _stream(
    client: httpx.AsyncClient, number: int, max_tokens: int, heard: Callable[[StreamResult], None]
) -> StreamResult:
    seen = StreamResult()
    body = {
        "model": ("tollhouse-demo", "tollhouse-demo:pirate", "tollhouse-demo:formal")[number % 3],
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": f"Tell story {number} of the toll."}],
    }
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:  # refused: nothing was opened, nothing is owed
                seen.failed = True
                return seen
            seen.request_id = answer.headers["x-request-id"]
            async for line in answer.aiter_lines():
                _read(line, seen)
                heard(seen)
    except httpx.HTTPError:
        seen.failed = True
    return seen


def _read(line: str, seen: StreamResult) -> None:
    if not line.startswith("data: {"):
        return
    event = json.loads(line[6:])
    if "error" in event:
        seen.failed = True
        return
    seen.usage = event.get("usage") or seen.usage
    if tokens := sum(len(choice.get("token_ids") or ()) for choice in event["choices"]):
        seen.tokens, seen.last = seen.tokens + tokens, tokens
    seen.chunks += sum(bool(choice["delta"].get("content")) for choice in event["choices"])


def audit_when_settled(command: Command, timeout_s: float = 120) -> dict[str, Any]:
    """The audit, once no request is left open in a spool."""
    deadline = time.monotonic() + timeout_s
    while True:
        done = command.run("audit", "--json")
        report: dict[str, Any] = json.loads(done.stdout)
        if not report["spool"]["running"] and not report["spool"]["unshipped"]:
            assert done.returncode == 0, report
            return report
        assert time.monotonic() < deadline, report
        time.sleep(1)


def free_port() -> int:
    """Below those that the kernel gives to connections: one of them might take it before it is bound."""
    while True:
        port = random.randrange(15_000, 30_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def start_engine(command: Command, place: str, *options: str) -> "subprocess.Popen[str]":
    receipts = command.data_dir / f"receipts-{place.rpartition(':')[2]}.log"
    engine = command.start(
        "engine",
        *("--model", str(ROOT / "engine/demo/weights"), "--listen", place),
        *("--receipts", str(receipts), *options),
    )
    assert engine.stdout is not None
    assert json.loads(engine.stdout.readline())["event"] == "ready"
    return engine


def start_worker(
    command: Command, prefix: str, *options: str, metrics_port: int = 0
) -> "subprocess.Popen[str]":
    log = (command.data_dir / "worker.txt").open("a")
    with log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "gateway.cli.main", "worker", "--prefix", prefix),
                *("--metrics-port", str(metrics_port), *options),
            ],
            cwd=ROOT,
            env=command.environment | {"C_FORCE_ROOT": "1"},
            stdout=log,
            stderr=log,
            text=True,
            process_group=0,
        )


def reap(process: "subprocess.Popen[str]") -> None:
    process.wait(60)
    if process.stdout is not None:
        process.stdout.close()


def sweep(prefix: str, broker: str) -> None:
    from kombu import Connection

    from core.queue import QUEUES

    with Connection(broker) as connection:
        for name in QUEUES:
            connection.default_channel.queue_delete(f"{prefix}.{name}")
