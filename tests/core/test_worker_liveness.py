"""A deaf worker whose broker answers says so; one that is busy, or whose broker is gone, does
not ask for a restart."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from core import worker_liveness
from core.worker_liveness import Pinger, Times


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_liveness, "PING_EVERY_S", 0.01)
    monkeypatch.setattr(worker_liveness, "SILENT_S", 0.2)


def test_a_worker_that_takes_no_ping_is_deaf_until_it_takes_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    times, hears = Times(tmp_path), threading.Event()
    pinger = Pinger(times, lambda: times.taken() if hears.is_set() else None, has_schedule=False)
    pinger.start()
    until(lambda: pinger.state().deaf.startswith("no task was taken for"))
    until(lambda: "must be restarted" in caplog.text)
    hears.set()
    until(lambda: not pinger.state().deaf)
    pinger.stop()
    assert caplog.text.count("must be restarted") == 1


def test_a_schedule_that_sends_nothing_is_seen_although_tasks_are_taken(tmp_path: Path) -> None:
    times = Times(tmp_path)
    pinger = Pinger(times, times.taken, has_schedule=True)
    pinger.start()
    until(lambda: pinger.state().deaf.startswith("the schedule sent nothing for"))
    pinger.stop()


def test_a_worker_with_a_long_task_is_not_deaf_within_the_task_s_limit(tmp_path: Path) -> None:
    times = Times(tmp_path)
    pinger = Pinger(times, lambda: None, has_schedule=False)
    times.begin(600)
    pinger.start()
    until(lambda: pinger.state().task_age_s > 0.5)
    assert not pinger.state().deaf
    times.begin(-1)  # the limit has passed
    until(lambda: bool(pinger.state().deaf))
    times.begin(600)
    times.end()
    until(lambda: bool(pinger.state().deaf))
    pinger.stop()


def test_a_broker_that_is_gone_is_no_reason_to_restart_and_its_return_gives_time(
    tmp_path: Path,
) -> None:
    gone = threading.Event()
    gone.set()

    def _send() -> None:
        if gone.is_set():
            raise ConnectionRefusedError("nobody listens")

    pinger = Pinger(Times(tmp_path), _send, has_schedule=True)
    pinger.start()
    until(lambda: pinger.state().task_age_s > 0.5)
    state = pinger.state()
    assert (state.deaf, state.broker_error) == ("", "nobody listens")
    gone.clear()
    until(lambda: not pinger.state().broker_error)
    until(lambda: bool(pinger.state().deaf))
    pinger.stop()
