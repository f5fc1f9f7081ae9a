"""Heartbeats of the task queues: a tiny task on each queue writes its time, by the same schedule, broker
and worker as all others. A queue whose beat is old has no worker, or no schedule."""

from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.heartbeat_models import QueueHeartbeat
from core.queue import QUEUES, TaskContext, task

EVERY_S = 30.0
SILENT = timedelta(seconds=4 * EVERY_S)


def _beat_of(queue: str) -> Callable[[TaskContext], None]:
    def _beat(context: TaskContext) -> None:
        with context.database.transaction() as session:
            session.merge(QueueHeartbeat(queue=queue, at=context.clock.now()))

    return _beat


for _queue in QUEUES:
    task(f"core.heartbeat_{_queue}", queue=_queue, every_s=EVERY_S, max_retries=0)(_beat_of(_queue))


def silent_queues(session: Session, now: datetime) -> dict[str, datetime | None]:
    """The queues without a beat for `SILENT`, with their last one; None if there was never one."""
    last = {row.queue: row.at for row in session.scalars(select(QueueHeartbeat))}
    return {
        queue: last.get(queue)
        for queue in QUEUES
        if queue not in last or now - last[queue] > SILENT
    }


def summary_of(silent: dict[str, datetime | None], now: datetime) -> str:
    """Such as "rating silent for 300 s, exports never seen"."""
    said = {
        queue: "never seen" if at is None else f"silent for {(now - at).total_seconds():.0f} s"
        for queue, at in silent.items()
    }
    return ", ".join(f"{queue} {words}" for queue, words in said.items())
