"""The Celery application: `tollhouse worker` runs it, gateways send to it."""

from celery import Celery

import billing.tasks  # noqa: F401  registers what billing schedules
import moderation.tasks  # noqa: F401  and what moderation does
from billing.payments.base import PaymentProvider
from core import celery_queue
from core.clock import SystemClock
from core.database import Database
from core.dead_letters import keeper
from core.errors import SettingError
from core.queue import TaskContext
from core.settings import Settings
from gateway.payments import make_payments


def make_worker(settings: Settings, prefix: str = "tollhouse") -> Celery:
    """An application whose task bodies make their services in the worker's own processes."""
    if not settings.broker_url:
        raise SettingError(
            "Without TOLLHOUSE_BROKER_URL the gateway itself runs the tasks; no worker is needed.",
            next_step="Set it to RabbitMQ's or Redis' address to use workers.",
        )
    app = celery_queue.make_app(settings.broker_url, prefix=prefix)
    celery_queue.serve(app, lambda: _services(settings))
    return app


def _services(settings: Settings) -> celery_queue.WorkerServices:
    clock = SystemClock()
    database = Database(settings.effective_database_url)
    context = TaskContext(settings, database, clock, {PaymentProvider: make_payments(settings)})
    return celery_queue.WorkerServices(context, keeper(database, clock))
