"""Tasks of one queue that wait do not delay those of another."""

import threading
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.database import Database
from core.queue import QUEUES, InProcessQueue, Task, TaskContext
from core.settings import Settings


@pytest.mark.parametrize("hung", QUEUES)
def test_hung_tasks_of_a_queue_leave_all_others_running(
    tmp_path: Path, sqlite_database: Database, hung: str
) -> None:
    let_go, done = threading.Event(), {each: threading.Event() for each in QUEUES}

    def _hang(_context: TaskContext) -> None:
        assert let_go.wait(60)

    def _run(_context: TaskContext, queue: str) -> None:
        done[queue].set()

    tasks = {
        "hang": Task("hang", _hang, hung, None, 0, 1.0, 60.0),
        **{each: Task(each, _run, each, None, 0, 1.0, 60.0) for each in QUEUES},
    }
    context = TaskContext(Settings(data_dir=tmp_path), sqlite_database, SystemClock())
    queue = InProcessQueue(context, tasks=tasks)
    try:
        for _ in range(20):
            queue.enqueue("hang")
        for each in QUEUES:
            queue.enqueue(each, queue=each)
        assert [each for each in QUEUES if each != hung and not done[each].wait(60)] == []
        assert not done[hung].is_set()
    finally:
        let_go.set()
        queue.stop()
