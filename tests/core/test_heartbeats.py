"""A queue without a worker is seen by its silence, whatever else works."""

from core import heartbeats
from core.clock import FakeClock
from core.database import Database
from core.queue import QUEUES, TASKS, TaskContext
from core.settings import Settings


def test_a_queue_whose_worker_died_is_silent(database: Database, clock: FakeClock) -> None:
    context = TaskContext(Settings(), database, clock)
    with database.read() as session:
        assert heartbeats.silent_queues(session, clock.now()) == dict.fromkeys(QUEUES)
    for queue in QUEUES:
        task = TASKS[f"core.heartbeat_{queue}"]
        assert task.queue == queue  # it comes the way of all others
        task(context)
    died = clock.now()
    for _ in range(5):
        clock.advance(heartbeats.EVERY_S)
        for queue in QUEUES:
            if queue != "rating":
                TASKS[f"core.heartbeat_{queue}"](context)
    with database.read() as session:
        silent = heartbeats.silent_queues(session, clock.now())
    assert silent == {"rating": died}
    assert heartbeats.summary_of(silent, clock.now()) == "rating silent for 150 s"
