"""Whether a worker still takes tasks, and its scheduler still sends them.

A worker's processes leave times in a directory that they share. Each worker has a queue of its own, to
which a second process sends a ping through the broker: a worker that takes none for `SILENT_S`,
though the broker takes them and no task is running, is deaf, and a restart mends it. While the broker
itself cannot be reached a restart would not help, so that alone is a matter of readiness.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

log = logging.getLogger("tollhouse.queue")
PING = "core.ping"
PING_EVERY_S = 10.0
SILENT_S = 90.0
_TAKEN, _SENT, _BUSY = "taken", "sent", "busy-"


class Times:
    """The monotonic clock's times, as modification times of files."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def taken(self) -> None:
        """A ping or task was taken."""
        self._write(_TAKEN, time.monotonic())

    def sent(self) -> None:
        """The scheduler sent a task, and the broker confirmed it."""
        self._write(_SENT, time.monotonic())

    def begin(self, limit_s: float) -> None:
        """This process runs a task that ends within `limit_s`."""
        self.taken()
        self._write(f"{_BUSY}{os.getpid()}", time.monotonic() + limit_s)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            (self._directory / f"{_BUSY}{os.getpid()}").unlink()

    def taken_at(self) -> float | None:
        return self._read(_TAKEN)

    def sent_at(self) -> float | None:
        return self._read(_SENT)

    def is_busy(self) -> bool:
        """Whether a task runs within its time limit."""
        now = time.monotonic()
        return any((self._read(path.name) or 0) > now for path in self._directory.glob(f"{_BUSY}*"))

    def _write(self, name: str, at: float) -> None:
        with contextlib.suppress(OSError):  # the worker is ending
            path, ns = self._directory / name, round(at * 1e9)
            path.touch()
            os.utime(path, ns=(ns, ns))

    def _read(self, name: str) -> float | None:
        try:
            return (self._directory / name).stat().st_mtime_ns / 1e9
        except OSError:
            return None


@dataclass(frozen=True, slots=True)
class Liveness:
    task_age_s: float  # since a ping or task was taken
    sent_age_s: float | None  # since the scheduler sent a task; None: it runs elsewhere
    broker_error: str  # "" if the last ping reached the broker
    is_busy: bool

    @property
    def deaf(self) -> str:
        """Why a restart would help; "" if it would not."""
        if self.broker_error:
            return ""
        if self.task_age_s > SILENT_S and not self.is_busy:
            return f"no task was taken for {self.task_age_s:.0f} s, though the broker answers"
        if self.sent_age_s is not None and self.sent_age_s > SILENT_S:
            return (
                f"the schedule sent nothing for {self.sent_age_s:.0f} s, though the broker answers"
            )
        return ""


class Pinger:
    """Sends pings from a thread, and judges by what the worker has left."""

    def __init__(self, times: Times, send: Callable[[], None], *, has_schedule: bool) -> None:
        self._times, self._send = times, send
        self._has_schedule = has_schedule
        self._error = ""
        self._reached_at = self._began = time.monotonic()
        self._said = ""
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="tollhouse-ping", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        self._stopping.set()
        self._thread.join(timeout_s)

    def state(self) -> Liveness:
        now = time.monotonic()
        # What waited for the broker gets its time again.
        since = max(self._began, self._reached_at)
        taken = max(self._times.taken_at() or 0, since)
        sent = max(self._times.sent_at() or 0, since)
        return Liveness(
            max(0.0, now - taken),
            max(0.0, now - sent) if self._has_schedule else None,
            self._error,
            self._times.is_busy(),
        )

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._send()
            except Exception as error:
                if not self._error:
                    log.warning("the broker cannot be reached: %s", error)
                self._error = str(error) or type(error).__name__
            else:
                if self._error:
                    log.warning("the broker answers again")
                    self._reached_at = time.monotonic()
                self._error = ""
            deaf = self.state().deaf
            if deaf and not self._said:
                log.error("this worker must be restarted: %s", deaf)
            self._said = deaf
            self._stopping.wait(PING_EVERY_S)
