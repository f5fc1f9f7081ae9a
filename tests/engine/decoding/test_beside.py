"""The thread beside the model: each job is done once, by one thread, and the process outlives it."""

import gc
import threading
from threading import Event

import pytest

from engine.decoding.grammar.beside import Beside, Job

SOON_S = 60.0


def test_a_job_is_done_by_the_thread_and_waited_for() -> None:
    beside, done_by = Beside("beside"), []
    for _ in range(3):
        job = beside.submit(lambda: done_by.append(threading.current_thread().name))
        job.wait(SOON_S)
        assert job.done() and job.exception() is None
        assert not job.cancel()
    assert done_by == ["beside"] * 3


def test_a_job_that_has_not_begun_is_taken_back() -> None:
    beside, go, done = Beside("beside"), Event(), []
    first = beside.submit(lambda: done.append(go.wait(SOON_S)))
    second = beside.submit(lambda: done.append("second"))
    assert second.cancel() and not second.cancel()
    first.wait(0.001)
    assert not first.done()
    go.set()
    first.wait(None)
    beside.submit(lambda: done.append("third")).wait(SOON_S)
    assert done == [True, "third"]
    assert not second.done()


def test_what_a_job_raises_is_kept_and_the_thread_goes_on() -> None:
    beside = Beside("beside")
    job = beside.submit(lambda: 1 / 0)
    job.wait(SOON_S)
    assert isinstance(job.exception(), ZeroDivisionError)
    after = beside.submit(lambda: None)
    after.wait(SOON_S)
    assert after.done() and after.exception() is None


@pytest.mark.parametrize("used", [False, True])
def test_the_thread_ends_with_its_owner(used: bool) -> None:
    beside = Beside("beside")
    thread = beside._thread
    if used:
        beside.submit(lambda: None).wait(SOON_S)
    assert thread.is_alive() == used
    del beside
    gc.collect()
    assert not thread.is_alive()


def test_a_job_runs_once() -> None:
    done: list[int] = []
    job = Job(lambda: done.append(1))
    for _ in range(3):
        job.run()
    assert done == [1] and job.done()
