"""Waits for work of a library that has no time-out for the whole of it, as against a server that sends a
byte now and then. What is given up goes on in its thread until its connection ends, and nobody hears it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(work: Callable[[], T], seconds: float, what: str) -> T:
    """The result, or TimeoutError with `what` did not end in time."""
    ended = _started(work)
    try:
        return ended.result(seconds)
    except TimeoutError:
        if ended.done():
            raise  # the work's own
        raise TimeoutError(f"{what} did not end within {seconds:g} s") from None


def while_alive(work: Callable[[], T], look: Callable[[], object], every_s: float) -> T:
    """The result of work that may take as long as it likes while `look` succeeds; it is called every so
    often, and its second failure in a row is raised."""
    ended, failed = _started(work), False
    while True:
        try:
            return ended.result(every_s)
        except TimeoutError:
            if ended.done():
                raise
        try:
            within(look, every_s, "a look at the server")
            failed = False
        except Exception:
            if ended.done():
                continue
            if failed:
                raise
            failed = True


def _started(work: Callable[[], T]) -> "Future[T]":
    ended: Future[T] = Future()

    def _run() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=_run, daemon=True, name="tollhouse-waiting").start()
    return ended
