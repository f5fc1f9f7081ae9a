"""Tasks that leave marks in a file, and a worker process that runs them over a broker."""

import json
import os
import sys
import time
from pathlib import Path

from core.celery_queue import WorkerServices, make_app, serve, worker_arguments
from core.clock import SystemClock
from core.database import Database
from core.dead_letters import keeper
from core.queue import Task, TaskContext
from core.settings import Settings


def mark(context: TaskContext, word: str, **_: object) -> None:
    with (context.settings.data_dir / "marks").open("a") as file:
        file.write(f"{word}\n")


def marks(folder: Path) -> list[str]:
    path = folder / "marks"
    return path.read_text().split() if path.exists() else []


def _slow(context: TaskContext, word: str) -> None:
    mark(context, f"{word}-began")
    time.sleep(1.0)
    mark(context, f"{word}-done")


def _fails_twice(context: TaskContext, word: str) -> None:
    mark(context, word)
    if marks(context.settings.data_dir).count(word) < 3:
        raise RuntimeError("not yet")


def _fails(context: TaskContext, word: str) -> None:
    mark(context, word)
    if not (context.settings.data_dir / "mended").exists():
        raise RuntimeError("broken for good")


def _tick(context: TaskContext) -> None:
    mark(context, "tick")


def tasks() -> dict[str, Task]:
    made = (
        Task("test.mark", mark, "default", None, 3, 0.05, 30),
        Task("test.slow", _slow, "invoices", None, 3, 0.05, 30),
        Task("test.fails_twice", _fails_twice, "rating", None, 5, 0.05, 30),
        Task("test.fails", _fails, "payments", None, 2, 0.05, 30),
        Task("test.tick", _tick, "exports", 0.5, 0, 0.05, 30),
    )
    return {each.name: each for each in made}


def _services() -> WorkerServices:
    folder = Path(os.environ["TOLLHOUSE_TEST_FOLDER"])
    database = Database(f"sqlite:///{folder / 'tollhouse.db'}")
    clock = SystemClock()
    context = TaskContext(Settings(data_dir=folder), database, clock)
    return WorkerServices(context, keeper(database, clock))


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    app = make_app(
        wanted["broker"],
        prefix=wanted["prefix"],
        tasks=tasks(),
        visibility_timeout_s=wanted["visibility_timeout_s"],
    )
    serve(app, _services, tasks())
    app.worker_main(
        worker_arguments(wanted["prefix"], concurrency=2, beat_file=wanted["beat_file"])
    )
