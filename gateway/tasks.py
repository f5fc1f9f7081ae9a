"""Where scheduled work runs: in this process while it is the machine's leader, or on Celery."""

import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import Protocol

import billing.tasks  # noqa: F401  registers what billing schedules
import moderation.tasks  # noqa: F401  and what moderation does
from core.queue import InProcessQueue, OnDead, TaskContext

log = logging.getLogger("tollhouse.tasks")
_TRY_EVERY_S = 2.0


class Runner(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


class NoRunner:
    """Celery workers do it."""

    def start(self) -> None:
        return

    def stop(self) -> None:
        return


class LeaderRunner:
    """Of several gateway processes on one data directory exactly one runs the schedule: the one
    that holds the lock. When it dies the system drops the lock and another takes over."""

    def __init__(self, lock_file: Path, context: TaskContext, on_dead: OnDead) -> None:
        self._lock_file = lock_file
        self._context = context
        self._on_dead = on_dead
        self._stopping = threading.Event()
        self._queue: InProcessQueue | None = None
        self._thread = threading.Thread(target=self._run, name="tollhouse-leader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(15)

    def _run(self) -> None:
        self._lock_file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._lock_file, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            while not self._locked(descriptor):
                if self._stopping.wait(_TRY_EVERY_S):
                    return
            queue = InProcessQueue(self._context, on_dead=self._on_dead)
            queue.start()
            self._stopping.wait()
            queue.stop()
        finally:
            os.close(descriptor)

    def _locked(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
