"""The task registry on Celery, over RabbitMQ or Redis: late acknowledgement, retries with back-off
and jitter, time limits, one queue per kind of work, and the beat schedule from the registry.

A message is acknowledged when its task has ended. If a worker is killed, its message is redelivered:
at once by RabbitMQ, after the visibility time-out by Redis.
"""

import logging
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from celery import Celery, signals
from celery import Task as CeleryTask
from kombu.entity import Queue

from core import metrics
from core.errors import SettingError
from core.queue import QUEUES, TASKS, DeadLetterHandler, Task, TaskContext
from core.worker_liveness import PING, SILENT_S, Times

log = logging.getLogger("tollhouse.queue")
_SENT_AT = "tollhouse_sent_at"
# A publisher whose message is not confirmed in time connects again and sends it again. A consumer whose
# broker sends nothing for two heartbeats does too.
_HEARTBEAT_S = 4
_CONFIRM_S = 5.0
_ANSWER_S = 10.0  # longest wait for the broker's answer to any call
_REDIS_ANSWER_S = 5  # longer than the second for which a consumer's BRPOP blocks
_HARD_LIMIT_S = 30.0  # after a task's soft time limit
_USER_TIMEOUT_MS = 15_000  # how long sent data may stay unacknowledged by TCP


@dataclass(frozen=True, slots=True)
class WorkerServices:
    """Services that each worker process creates after the fork."""

    context: TaskContext
    on_dead_letter: DeadLetterHandler


class CeleryQueue:
    """Enqueues tasks by name. Worker processes run them, so `start` does nothing here."""

    def __init__(self, app: Celery, tasks: dict[str, Task] | None = None) -> None:
        self._app = app
        self._tasks = TASKS if tasks is None else tasks

    def enqueue(self, name: str, **arguments: Any) -> None:
        task = self._tasks[name]
        self._app.send_task(
            name,
            kwargs=arguments,
            queue=_queue_name(self._app, task.queue),
            headers={_SENT_AT: time.time_ns()},
            confirm_timeout=_CONFIRM_S,
            retry=True,
            retry_policy={"max_retries": 3, "interval_start": 0.2, "interval_max": 1.0},
        )

    def start(self) -> None:
        """No-op: worker processes run the tasks."""

    def stop(self, timeout_s: float = 10.0) -> None:
        self._app.close()


def make_app(
    broker_url: str,
    *,
    prefix: str = "tollhouse",
    tasks: dict[str, Task] | None = None,
    visibility_timeout_s: float | None = None,
) -> Celery:
    """A Celery application with the queues and the beat schedule of every registered task."""
    if not broker_url.startswith(("amqp://", "amqps://", "redis://", "rediss://")):
        raise SettingError(
            "TOLLHOUSE_BROKER_URL is not a RabbitMQ or Redis address.",
            next_step="Write amqp://user:password@host:5672/vhost or redis://host:6379/0.",
        )
    known = TASKS if tasks is None else tasks
    longest = max((each.time_limit_s for each in known.values()), default=300.0)
    app = Celery("tollhouse", broker=broker_url, backend=None, set_as_current=False)
    app.conf.update(
        tollhouse_prefix=prefix,
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_acks_on_failure_or_timeout=True,
        task_create_missing_queues=True,
        task_default_queue=f"{prefix}.default",
        task_queues=[_declared(f"{prefix}.{name}") for name in QUEUES],
        worker_prefetch_multiplier=1,
        worker_send_task_events=False,
        worker_enable_remote_control=False,
        worker_cancel_long_running_tasks_on_connection_loss=True,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_connection_timeout=5,
        broker_heartbeat=_HEARTBEAT_S,
        broker_pool_limit=4,
        broker_transport_options=_transport(
            broker_url, prefix, visibility_timeout_s or longest + 60.0
        ),
        beat_schedule=schedule(known, prefix),
        timezone="UTC",
        enable_utc=True,
    )
    return app


def schedule(tasks: dict[str, Task], prefix: str = "tollhouse") -> dict[str, dict[str, Any]]:
    """The beat schedule. A tick expires when the next one is due."""
    return {
        each.name: {
            "task": each.name,
            "schedule": each.every_s,
            "options": {
                "queue": f"{prefix}.{each.queue}",
                "expires": max(each.every_s, 1.0),
                "confirm_timeout": _CONFIRM_S,
            },
        }
        for each in tasks.values()
        if each.every_s is not None
    }


def serve(
    app: Celery,
    services: Callable[[], WorkerServices],
    tasks: dict[str, Task] | None = None,
    *,
    times: Times | None = None,
) -> None:
    """Register the task functions. Each worker process creates its services once, on its first
    task, because connections do not survive a fork. `times` gets the signs of life.
    """
    created: list[WorkerServices] = []

    def _services() -> WorkerServices:
        if not created:
            created.append(services())
        return created[0]

    for each in (TASKS if tasks is None else tasks).values():
        _register(app, each, _services, times)
    if times is not None:
        app.task(times.taken, name=PING)
        _note_sent(times)


def _note_sent(times: Times) -> None:
    """Messages that the scheduler's process sends leave their time; those of other processes do not."""

    def _sent(**_: Any) -> None:
        times.sent()

    def _in_beat(**_: Any) -> None:
        signals.after_task_publish.connect(_sent, weak=False)

    signals.beat_embedded_init.connect(_in_beat, weak=False)


def ping_queue(app: Celery, name: str) -> Queue:
    """A worker's own queue. RabbitMQ deletes it some minutes after the worker."""
    return Queue(  # type: ignore[no-untyped-call]
        _queue_name(app, name), routing_key=_queue_name(app, name), durable=False, expires=600.0
    )


def ping(app: Celery, name: str) -> None:
    """Send a ping to the queue over a new connection. Raises what the broker's client does."""
    queue = ping_queue(app, name)
    with app.connection_for_write() as connection:
        app.send_task(
            PING,
            queue=queue,
            connection=connection,
            expires=SILENT_S,
            confirm_timeout=_CONFIRM_S,
            retry=False,
        )


def drop_ping_queue(app: Celery, name: str) -> None:
    with app.connection_for_write() as connection:
        connection.default_channel.queue_delete(_queue_name(app, name))


def worker_arguments(
    prefix: str, queues: Iterable[str] = QUEUES, *, concurrency: int = 2, beat_file: str = ""
) -> list[str]:
    """Arguments for `app.worker_main`. With `beat_file` the worker runs the beat schedule too."""
    names = ",".join(f"{prefix}.{name}" for name in queues)
    arguments = ["worker", "--loglevel", "WARNING", "--queues", names, "--pool", "prefork"]
    arguments += ["--concurrency", str(concurrency), "--without-gossip", "--without-mingle"]
    # Celery's events: nobody reads them, and the consumer would wait for their confirmation.
    arguments.append("--without-heartbeat")
    return [*arguments, "--beat", "--schedule", beat_file] if beat_file else arguments


def _register(
    app: Celery, each: Task, services: Callable[[], WorkerServices], times: Times | None
) -> None:
    def _run(self: CeleryTask, **arguments: Any) -> None:
        sent_at = (self.request.headers or {}).get(_SENT_AT)
        if sent_at is not None and self.request.retries == 0:
            metrics.queue_age_seconds.labels(each.queue).observe(
                max(0.0, (time.time_ns() - sent_at) / 1e9)
            )
        if times is not None:
            times.begin(each.time_limit_s + _HARD_LIMIT_S)
        worker_services = services()
        started = time.monotonic()
        try:
            each.run(worker_services.context, **arguments)
        except Exception as error:
            _failed(self, each, arguments, error, worker_services.on_dead_letter)
        finally:
            metrics.task_seconds.labels(each.name).observe(time.monotonic() - started)
            if times is not None:
                times.end()

    app.task(
        _run,
        name=each.name,
        bind=True,
        max_retries=None,
        soft_time_limit=each.time_limit_s,
        time_limit=each.time_limit_s + _HARD_LIMIT_S,
    )


def _failed(
    task: CeleryTask,
    each: Task,
    arguments: dict[str, Any],
    error: Exception,
    on_dead_letter: DeadLetterHandler,
) -> None:
    attempt = task.request.retries + 1
    if attempt > each.max_retries:
        log.error("%s failed permanently after %d attempts: %s", each.name, attempt, error)
        on_dead_letter(each, arguments, error, attempt)
        return
    delay = each.retry_delay_s(attempt)
    log.warning("%s failed (attempt %d), again in %.1f s: %s", each.name, attempt, delay, error)
    metrics.task_retries.labels(each.name).inc()
    queue = _queue_name(task.app, each.queue)
    raise task.retry(exc=error, countdown=delay, queue=queue) from error


def _declared(name: str) -> Queue:
    return Queue(name, routing_key=name)  # type: ignore[no-untyped-call]


def _queue_name(app: Celery, queue: str) -> str:
    return f"{app.conf.tollhouse_prefix}.{queue}"


def _transport(broker_url: str, prefix: str, visibility_timeout_s: float) -> dict[str, Any]:
    if not broker_url.startswith("redis"):
        return {
            # Without confirms a message to a connection that passes nothing on is lost without an error.
            "confirm_publish": True,
            "read_timeout": _ANSWER_S,
            "write_timeout": _ANSWER_S,
            "socket_settings": {socket.TCP_USER_TIMEOUT: _USER_TIMEOUT_MS},
        }
    return {
        "visibility_timeout": visibility_timeout_s,
        "global_keyprefix": f"{prefix}:",
        "socket_keepalive": True,
        "health_check_interval": _REDIS_ANSWER_S,
        "socket_timeout": _REDIS_ANSWER_S,
        "socket_connect_timeout": 5,
    }
