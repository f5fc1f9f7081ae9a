"""Heartbeats to the gateways while a step runs, from a thread of their own.

A ZeroMQ socket serves one thread at a time: the loop holds the lock except during a step, and only
then does this thread send.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Beats:
    """Calls `send` every `interval_s` while the loop is inside `stepping`."""

    def __init__(self, send: Callable[[], None], interval_s: float) -> None:
        self._send = send
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._lock.acquire()
        self._stop = threading.Event()
        self.sent_at = 0.0
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """The loop leaves the socket to the heartbeats for the time of the block."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Within `stepping`, the loop has the socket for the time of the block."""
        with self._lock:
            yield

    @property
    def due(self) -> bool:
        return time.monotonic() >= self.sent_at + self._interval_s

    def close(self) -> None:
        self._stop.set()
        self._lock.release()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s / 2):
            with self._lock:
                if self.due and not self._stop.is_set():
                    self._send()
                    self.sent_at = time.monotonic()
