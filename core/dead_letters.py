"""Dead letters: tasks that exhausted their retries, stored with their arguments for replay."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core import metrics
from core.clock import Clock
from core.database import Database
from core.dead_letter_models import DeadLetter
from core.queue import DeadLetterHandler, Task, TaskQueue


def keeper(database: Database, clock: Clock) -> DeadLetterHandler:
    """A queue's `on_dead` callback, which stores the task in its own transaction."""

    def _store(task: Task, arguments: dict[str, Any], error: Exception, attempts: int) -> None:
        metrics.dead_letters.labels(task.name).inc()
        with database.transaction() as session:
            session.add(
                DeadLetter(
                    task=task.name,
                    queue=task.queue,
                    arguments=arguments,
                    error=f"{type(error).__name__}: {error}"[:2000],
                    attempts=attempts,
                    died_at=clock.now(),
                )
            )

    return _store


def unreplayed(session: Session) -> list[DeadLetter]:
    """Dead letters not yet replayed, oldest first."""
    query = select(DeadLetter).where(DeadLetter.replayed_at.is_(None))
    return list(session.scalars(query.order_by(DeadLetter.died_at, DeadLetter.id)))


def replay(
    database: Database, clock: Clock, queue: TaskQueue, ids: Iterable[int] | None = None
) -> int:
    """Enqueue dead letters again, all of them or those in `ids`; returns how many. They are enqueued
    before they are marked, because tasks are idempotent and may run twice.
    """
    with database.transaction() as session:
        letters = unreplayed(session)
        if ids is not None:
            chosen = set(ids)
            letters = [letter for letter in letters if letter.id in chosen]
        for letter in letters:
            queue.enqueue(letter.task, **letter.arguments)
            letter.replayed_at = clock.now()
    return len(letters)
