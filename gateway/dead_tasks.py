"""Tasks that failed for good, for `tollhouse worker`: shown, and played again."""

from collections.abc import Iterable
from typing import Any

import billing.tasks  # noqa: F401  registers the tasks that may have died
from billing.payments.base import PaymentProvider
from core import dead_letters
from core.celery_queue import CeleryQueue
from core.queue import TASKS, TaskContext, TaskQueue
from gateway.payments import make_payments
from gateway.toolbox import Toolbox
from gateway.worker import make_worker


class _Here:
    """Without a broker the tasks run in this process, once their letters are marked."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def enqueue(self, name: str, **arguments: Any) -> None:
        self.sent.append((name, arguments))

    def start(self) -> None:
        return

    def stop(self, timeout_s: float = 10.0) -> None:
        return


def listed(tools: Toolbox) -> list[dict[str, Any]]:
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
            for letter in dead_letters.waiting(session)
        ]


def replay(tools: Toolbox, ids: Iterable[int], prefix: str) -> int:
    """All of them without ids; returns how many were played. One that fails here is kept anew."""
    chosen = list(ids) or None
    here = _Here()
    queue: TaskQueue = here
    if tools.settings.broker_url:
        queue = CeleryQueue(make_worker(tools.settings, prefix))
    played = dead_letters.replay(tools.database, tools.clock, queue, chosen)
    queue.stop()
    keep = dead_letters.keeper(tools.database, tools.clock)
    services: dict[type, object] = {PaymentProvider: make_payments(tools.settings)}
    context = TaskContext(tools.settings, tools.database, tools.clock, services)
    for name, arguments in here.sent:
        try:
            TASKS[name](context, **arguments)
        except Exception as error:
            keep(TASKS[name], arguments, error, 1)
    return played
