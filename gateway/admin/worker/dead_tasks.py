"""Runs tasks on demand, lists and replays those that failed: for the command line and the dashboard."""

from collections.abc import Iterable
from typing import Any

import billing.tasks  # noqa: F401  registers the tasks to replay
from core import dead_letters
from core.queue import TASKS, TaskContext, TaskQueue
from gateway.admin.console import CommandContext
from gateway.serving.payments import make_payments, task_services


class _LocalQueue:
    """Collects tasks to run in this process, for deployments without a broker."""

    def __init__(self) -> None:
        self.enqueued: list[tuple[str, dict[str, Any]]] = []

    def enqueue(self, name: str, **arguments: Any) -> None:
        self.enqueued.append((name, arguments))

    def start(self) -> None:
        return

    def stop(self, timeout_s: float = 10.0) -> None:
        return


def list_dead_tasks(tools: CommandContext) -> list[dict[str, Any]]:
    with tools.database.read() as session:
        return [
            {
                "id": letter.id,
                "task": letter.task,
                "arguments": letter.arguments,
                "attempts": letter.attempts,
                "died_at": letter.died_at.isoformat(),
                "error": letter.error,
            }
            for letter in dead_letters.unreplayed(session)
        ]


def run_now(tools: CommandContext, name: str, prefix: str) -> None:
    """Run a task: by a worker, or without a broker in this process."""
    if tools.settings.broker_url:
        queue = _broker_queue(tools, prefix)
        queue.enqueue(name)
        queue.stop()
        return
    services = task_services(tools.settings, tools.clock, make_payments(tools.settings))
    TASKS[name](TaskContext(tools.settings, tools.database, tools.clock, services))


def replay(tools: CommandContext, ids: Iterable[int], prefix: str) -> int:
    """Replays all dead letters when `ids` is empty. Returns how many were replayed. A task that
    fails again in this process becomes a new dead letter."""
    selected = list(ids) or None
    local_queue = _LocalQueue()
    queue: TaskQueue = local_queue
    if tools.settings.broker_url:
        queue = _broker_queue(tools, prefix)
    replayed = dead_letters.replay(tools.database, tools.clock, queue, selected)
    queue.stop()
    keep = dead_letters.keeper(tools.database, tools.clock)
    services = task_services(tools.settings, tools.clock, make_payments(tools.settings))
    context = TaskContext(tools.settings, tools.database, tools.clock, services)
    for name, arguments in local_queue.enqueued:
        try:
            TASKS[name](context, **arguments)
        except Exception as error:
            keep(TASKS[name], arguments, error, 1)
    return replayed


def _broker_queue(tools: CommandContext, prefix: str) -> TaskQueue:
    # The dashboard imports this file; Celery takes 0.5 s to import.
    from core.celery_queue import CeleryQueue
    from gateway.admin.worker.application import make_worker

    return CeleryQueue(make_worker(tools.settings, prefix))
