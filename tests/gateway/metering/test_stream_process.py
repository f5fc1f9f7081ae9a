"""The consumer of a stream step by step: its pauses, its measurements, and its end with its input."""

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core import metrics
from core.clock import FakeClock
from core.settings import Settings
from gateway.metering.streams import consumer
from gateway.metering.streams.base import Lag
from tests.gateway.metering.spool_rows import NOW


class Stopping(threading.Event):
    """Notes the pauses instead of waiting for them; the last one is the end."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.pauses: list[float] = []
        self.rounds = rounds

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        return False

    def is_set(self) -> bool:
        self.rounds -= 1
        return self.rounds < 0


class Store:
    """Fails where `fails` says so."""

    def __init__(self, fails: str) -> None:
        self.clock = FakeClock(NOW)
        self.fails = list(fails)
        self.measured: list[float] = []
        self.calls = 0
        self.stream: Any = SimpleNamespace(lag=self._lag)

    def _lag(self) -> Lag:
        self.measured.append(self.calls)
        return Lag(7, self.clock.now() - timedelta(seconds=90))

    def store_next(self, wait_s: float) -> int:
        assert wait_s == 1.0
        self.calls += 1
        self.clock.advance(wait_s)
        if self.fails and self.fails.pop(0) == "x":
            raise ConnectionError("the database is away")
        return 1


def test_failures_are_retried_after_longer_and_longer_pauses_until_one_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, stopping = Store("xxxxxxxx.x"), Stopping(11)
    with caplog.at_level(logging.WARNING, "tollhouse.stream"):
        consumer.consume(store, stopping)  # type: ignore[arg-type]
    assert stopping.pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 0.2])
    assert store.calls == 11 and "the database is away" in caplog.text


def test_what_waits_is_measured_every_five_seconds() -> None:
    store = Store("")
    consumer.consume(store, Stopping(12))  # type: ignore[arg-type]
    assert store.measured == [0, 5, 10]
    assert metrics.stream_messages._value.get() == 7
    assert metrics.stream_age_seconds._value.get() == 90


class Stream:
    def __init__(self) -> None:
        self.fetched, self.closed = 0, False

    def lag(self) -> Lag:
        return Lag(0, None)

    def fetch(self, _most: int, _wait_s: float) -> list[Any]:
        self.fetched += 1
        time.sleep(0.01)
        return []

    def close(self) -> None:
        self.closed = True


def test_the_process_stores_until_its_input_ends_and_closes_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, ended, ignored = Stream(), list[int](), set[int]()
    config = {"stream": "nats://a", "database": f"sqlite:///{tmp_path}/books.db"}
    read, write = os.pipe()
    given_to = os.fdopen(read, "r")
    monkeypatch.setattr(sys, "stdin", given_to)
    monkeypatch.setattr(signal, "signal", lambda number, _action: ignored.add(number))
    monkeypatch.setattr(consumer.logs, "configure", lambda level, style: None)
    monkeypatch.setattr(consumer, "open_stream", lambda url: stream if url == "nats://a" else None)
    monkeypatch.setattr(consumer.os, "_exit", ended.append)
    with os.fdopen(write, "w") as given:
        given.write(json.dumps({**config, "level": "error", "format": "console"}) + "\n")
        given.flush()
        thread = threading.Thread(target=consumer.main)
        thread.start()
        deadline = time.monotonic() + 20
        while stream.fetched < 20 and time.monotonic() < deadline and thread.is_alive():
            time.sleep(0.01)
        assert stream.fetched >= 20 and not stream.closed and ended == []
    thread.join(20)
    given_to.close()
    assert ended == [0] and stream.closed
    assert ignored == {signal.SIGINT, signal.SIGTERM}


class Process:
    """A child that lives until its input is closed or the test ends it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.said = pid, list[str]()
        self.over = threading.Event()
        self.stdin = SimpleNamespace(write=self.said.append, flush=bool, close=self.over.set)

    def wait(self, timeout: float | None = None) -> int:
        assert self.over.wait(timeout or 30)
        return 0


def test_a_consumer_that_ends_is_started_again_until_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Process] = []

    def _popen(command: list[str], **_given: Any) -> Process:
        assert command[-1] == "gateway.metering.streams.consumer"
        started.append(Process(100 + len(started)))
        return started[-1]

    monkeypatch.setattr(consumer.subprocess, "Popen", _popen)
    monkeypatch.setattr(consumer, "_FIRST_PAUSE_S", 0.01)
    settings = Settings(stream_url="nats://a", database_url="postgresql://b/c")
    made = consumer.StreamConsumer(settings)
    assert made.pid is None
    made.start()
    for number in (1, 2, 3):
        until(lambda count=number: len(started) == count and bool(started[-1].said))  # type: ignore[misc]
        assert made.pid == 99 + number
        config = json.loads("".join(started[-1].said))
        assert (config["stream"], config["database"]) == ("nats://a", "postgresql://b/c")
        if number < 3:
            started[-1].over.set()
    made.stop()
    assert started[-1].over.is_set() and len(started) == 3
    assert "tollhouse-stream" not in [each.name for each in threading.enumerate()]


def test_without_a_stream_no_process_is_started() -> None:
    made = consumer.StreamConsumer(Settings())
    made.start()
    assert made.pid is None
    made.stop()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)
