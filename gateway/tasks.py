"""Runs scheduled tasks in this process while it holds the leader lock, or leaves them to Celery."""

import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import Protocol

import billing.tasks  # noqa: F401  registers billing's tasks
import core.heartbeats  # noqa: F401  registers a heartbeat of each queue
import moderation.tasks  # noqa: F401  registers moderation's tasks
from core.queue import DeadLetterHandler, InProcessQueue, TaskContext
from gateway.metering.streams.consumer import StreamConsumer

log = logging.getLogger("tollhouse.tasks")
_RETRY_S = 2.0


class Runner(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


class NoRunner:
    """Used with a broker: Celery workers run the tasks."""

    def start(self) -> None:
        return

    def stop(self) -> None:
        return


class LeaderRunner:
    """Runs the schedule in exactly one of the gateway processes that share a data directory: the
    one that holds the file lock. The kernel releases it on exit, and another process takes over."""

    def __init__(
        self, lock_file: Path, context: TaskContext, on_dead_letter: DeadLetterHandler
    ) -> None:
        self._lock_file = lock_file
        self._context = context
        self._on_dead = on_dead_letter
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
            while not self._try_lock(descriptor):
                if self._stopping.wait(_RETRY_S):
                    return
            queue = InProcessQueue(self._context, on_dead_letter=self._on_dead)
            consumer = StreamConsumer(self._context.settings)
            consumer.start()
            queue.start()
            self._stopping.wait()
            queue.stop()
            consumer.stop()
        finally:
            os.close(descriptor)

    def _try_lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
