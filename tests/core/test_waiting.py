"""Work against servers that are slow, silent or neither."""

import threading
import time

import pytest

from core.waiting import while_alive, within


def test_results_and_errors_pass_through() -> None:
    assert within(lambda: 7, 5, "it") == 7
    assert while_alive(lambda: 7, lambda: None, 5) == 7
    with pytest.raises(KeyError):
        within(lambda: {}["a"], 5, "it")
    with pytest.raises(KeyError):
        while_alive(lambda: {}["a"], lambda: None, 5)


def test_what_does_not_end_in_time_is_given_up_by_name() -> None:
    forever = threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"the upload did not end within 0\.1 s"):
        within(forever.wait, 0.1, "the upload")
    assert time.monotonic() - began < 30
    forever.set()


def test_slow_work_goes_on_while_its_server_answers() -> None:
    looks: list[float] = []
    done = threading.Event()

    def _look() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            done.set()

    assert while_alive(done.wait, _look, 0.02) is True
    assert len(looks) >= 3


def test_the_second_failed_look_in_a_row_ends_it() -> None:
    forever, looks = threading.Event(), iter([True, False, True, False, False])

    def _look() -> None:
        if not next(looks):
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        while_alive(forever.wait, _look, 0.01)
    assert list(looks) == []
    forever.set()


def test_a_look_that_hangs_has_failed() -> None:
    forever = threading.Event()
    with pytest.raises(TimeoutError, match="a look at the server"):
        while_alive(forever.wait, forever.wait, 0.02)
    forever.set()
