"""Every scheduled task at once, as if its period had just passed."""

import contextlib

from kombu.exceptions import OperationalError

import billing.tasks  # noqa: F401 - registers its tasks
from benchmarks.chaos_site.site import Site
from core.celery_queue import CeleryQueue, make_app
from core.queue import TASKS


def run_scheduled_tasks(site: Site) -> None:
    """Those that the broker takes: a killed one is a fault of the round."""
    app = make_app(site.broker, prefix=site.prefix)
    queue = CeleryQueue(app)
    with contextlib.closing(app), contextlib.suppress(OperationalError, OSError):
        for each in TASKS.values():
            if each.every_s is not None:
                queue.enqueue(each.name)
