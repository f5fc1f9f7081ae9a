"""The Celery application that `tollhouse worker` runs and gateways enqueue to."""

from celery import Celery

import billing.tasks  # noqa: F401  registers billing's tasks
import core.heartbeats  # noqa: F401  registers a heartbeat of each queue
import moderation.tasks  # noqa: F401  registers moderation's tasks
from billing.archive.opening import open_database
from core import celery_queue
from core.clock import SystemClock
from core.dead_letters import keeper
from core.errors import SettingError
from core.queue import TaskContext
from core.settings import Settings
from core.worker_liveness import Times
from gateway.serving.payments import make_payments, task_services


def make_worker(
    settings: Settings, prefix: str = "tollhouse", *, times: Times | None = None
) -> Celery:
    """A Celery application whose tasks build their services inside the worker process."""
    if not settings.broker_url:
        raise SettingError(
            "TOLLHOUSE_BROKER_URL is not set: the gateway runs the tasks itself, without workers.",
            next_step="Set it to the URL of RabbitMQ or Redis to use workers.",
        )
    app = celery_queue.make_app(settings.broker_url, prefix=prefix)
    celery_queue.serve(app, lambda: _services(settings), times=times)
    return app


def _services(settings: Settings) -> celery_queue.WorkerServices:
    clock = SystemClock()
    database = open_database(settings)
    services = task_services(settings, clock, make_payments(settings))
    context = TaskContext(settings, database, clock, services)
    return celery_queue.WorkerServices(context, keeper(database, clock))
