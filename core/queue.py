"""Background tasks: one registry, two runners. Embedded: threads with a timer. Production: Celery.

Each queue of the embedded runner has threads of its own, so that work that waits for a machine
elsewhere, such as a receiver of messages, delays its own kind only.

A task is a plain function of a TaskContext and JSON-serialisable arguments. It must be idempotent,
because either runner may run it twice. Periodic tasks pick up any work whose message was lost, so a
lost message delays the work but does not lose it.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from core import metrics
from core.clock import Clock
from core.database import Database
from core.settings import Settings

log = logging.getLogger("tollhouse.queue")
Service = TypeVar("Service")


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Dependencies of tasks. `services` maps further ports by their type, set by the wiring."""

    settings: Settings
    database: Database
    clock: Clock
    services: dict[type, object] = field(default_factory=dict)

    def service(self, port: type[Service]) -> Service:
        service = self.services.get(port)
        if service is None:
            raise LookupError(f"no {port.__name__} in TaskContext.services; add it in the wiring")
        return service  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Task:
    name: str  # "billing.rate_events"
    run: Callable[..., Any]  # run(context, **arguments)
    queue: str  # of QUEUES
    every_s: float | None  # period of the schedule; None: on demand only
    max_retries: int
    retry_base_s: float
    time_limit_s: float

    def __call__(self, context: TaskContext, **arguments: Any) -> Any:
        return self.run(context, **arguments)

    def retry_delay_s(self, attempt: int) -> float:
        """Exponential back-off with jitter, at most ten minutes. `attempt` counts from 1."""
        return float(random.uniform(0.5, 1.0) * min(600.0, self.retry_base_s * 2 ** (attempt - 1)))


QUEUES = ("rating", "invoices", "payments", "exports", "messages", "default")
TASKS: dict[str, Task] = {}


def task(
    name: str,
    *,
    queue: str = "default",
    every_s: float | None = None,
    max_retries: int = 8,
    retry_base_s: float = 1.0,
    time_limit_s: float = 300.0,
) -> Callable[[Callable[..., Any]], Task]:
    """Register a task, with its queue, schedule and retry policy."""

    def _register(run: Callable[..., Any]) -> Task:
        new_task = Task(name, run, queue, every_s, max_retries, retry_base_s, time_limit_s)
        known = TASKS.setdefault(name, new_task)
        if known.run.__qualname__ != run.__qualname__:
            raise ValueError(f"two tasks are named {name!r}")
        TASKS[name] = new_task
        return new_task

    return _register


class TaskQueue(Protocol):
    def enqueue(self, name: str, **arguments: Any) -> None: ...

    def start(self) -> None: ...

    def stop(self, timeout_s: float = 10.0) -> None: ...


DeadLetterHandler = Callable[[Task, dict[str, Any], Exception, int], None]


class InProcessQueue:
    """Runs tasks in threads of this process, `threads` of each queue.

    `on_dead_letter` receives tasks whose retries are used up.
    """

    def __init__(
        self,
        context: TaskContext,
        *,
        threads: int = 2,
        on_dead_letter: DeadLetterHandler | None = None,
        tasks: dict[str, Task] | None = None,
    ) -> None:
        self._context = context
        self._tasks = TASKS if tasks is None else tasks
        # A pool starts its threads when they are needed.
        self._pools = {
            queue: ThreadPoolExecutor(threads, thread_name_prefix=f"tollhouse-{queue}")
            for queue in {each.queue for each in self._tasks.values()}
        }
        self._on_dead_letter = on_dead_letter
        self._stopping = threading.Event()
        self._timers: set[threading.Timer] = set()
        self._running: set[str] = set()
        self._lock = threading.Lock()

    def start(self) -> None:
        for each in self._tasks.values():
            if each.every_s is not None:
                self._schedule(each, each.every_s * random.uniform(0.1, 1.0))

    def enqueue(self, name: str, **arguments: Any) -> None:
        task = self._tasks[name]
        if not self._stopping.is_set():
            self._pools[task.queue].submit(self._first_attempt, task, arguments, time.monotonic())

    def stop(self, timeout_s: float = 10.0) -> None:
        self._stopping.set()
        with self._lock:
            timers = list(self._timers)
        for timer in timers:
            timer.cancel()
        waiter = threading.Thread(target=self._shut_down)
        waiter.start()
        waiter.join(timeout_s)

    def _shut_down(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in self._pools.values():
            pool.shutdown()

    def _first_attempt(self, task: Task, arguments: dict[str, Any], sent: float) -> None:
        metrics.queue_age_seconds.labels(task.queue).observe(time.monotonic() - sent)
        self._attempt(task, arguments, 1)

    def _attempt(self, task: Task, arguments: dict[str, Any], attempt: int) -> None:
        try:
            with metrics.task_seconds.labels(task.name).time():
                task.run(self._context, **arguments)
        except Exception as error:
            self._failed(task, arguments, attempt, error)

    def _failed(
        self, task: Task, arguments: dict[str, Any], attempt: int, error: Exception
    ) -> None:
        if attempt <= task.max_retries and not self._stopping.is_set():
            delay = task.retry_delay_s(attempt)
            metrics.task_retries.labels(task.name).inc()
            log.warning(
                "%s failed (attempt %d), again in %.1f s: %s", task.name, attempt, delay, error
            )
            self._later(delay, lambda: self._resubmit(task, arguments, attempt + 1))
            return
        log.error("%s failed permanently after %d attempts: %s", task.name, attempt, error)
        if self._on_dead_letter is not None:
            self._on_dead_letter(task, arguments, error, attempt)

    def _resubmit(self, task: Task, arguments: dict[str, Any], attempt: int) -> None:
        if not self._stopping.is_set():
            self._pools[task.queue].submit(self._attempt, task, arguments, attempt)

    def _schedule(self, task: Task, delay_s: float) -> None:
        self._later(delay_s, lambda: self._tick(task))

    def _tick(self, task: Task) -> None:
        if self._stopping.is_set() or task.every_s is None:
            return
        self._schedule(task, task.every_s)
        with self._lock:
            if task.name in self._running:  # the previous run has not ended
                return
            self._running.add(task.name)
        try:
            self._pools[task.queue].submit(self._periodic, task)
        except RuntimeError:  # the pool was shut down after `_stopping` was checked
            with self._lock:
                self._running.discard(task.name)

    def _periodic(self, task: Task) -> None:
        try:
            with metrics.task_seconds.labels(task.name).time():
                task.run(self._context)
        except Exception as error:
            # The next tick is the retry.
            log.warning("%s failed, again in %s s: %s", task.name, task.every_s, error)
        finally:
            with self._lock:
                self._running.discard(task.name)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        def _run() -> None:
            with self._lock:
                self._timers.discard(timer)
            if not self._stopping.is_set():
                call()

        timer = threading.Timer(delay_s, _run)
        timer.daemon = True
        with self._lock:
            self._timers.add(timer)
        timer.start()
