"""What every queue does with tasks: in-process, Celery on RabbitMQ, Celery on Redis."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from core import dead_letters
from core.celery_queue import CeleryQueue, make_app, schedule
from core.clock import SystemClock
from core.database import Database
from core.errors import SettingError
from core.queue import QUEUES, InProcessQueue, TaskContext, TaskQueue
from core.settings import Settings
from tests.conftest import RABBITMQ, REDIS, need_rabbitmq, need_redis
from tests.contracts.queue_tasks import marks, tasks
from tests.silent_proxy import SilentProxy

ROOT = Path(__file__).parents[2]
VISIBILITY_S = 2.0


class Bench:
    """A queue with somebody who works on it."""

    def __init__(self, folder: Path, database: Database, queue: TaskQueue) -> None:
        self.folder, self.database, self.queue = folder, database, queue
        self.start: Callable[[], None] = queue.start
        self.kill: Callable[[], None] = lambda: None

    def marks(self) -> list[str]:
        return marks(self.folder)

    def wait(self, wanted: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not wanted():
            assert time.monotonic() < deadline, f"waited in vain; marks: {self.marks()}"
            time.sleep(0.03)


@pytest.fixture(params=["in-process", "rabbitmq", "redis"])
def bench(
    request: pytest.FixtureRequest, tmp_path: Path, sqlite_database: Database
) -> Iterator[Bench]:
    if request.param == "in-process":
        yield from _in_process(tmp_path, sqlite_database)
        return
    (need_rabbitmq if request.param == "rabbitmq" else need_redis)()
    broker = RABBITMQ if request.param == "rabbitmq" else REDIS
    yield from _celery(broker, tmp_path, sqlite_database)


def _in_process(folder: Path, database: Database) -> Iterator[Bench]:
    clock = SystemClock()
    context = TaskContext(Settings(data_dir=folder), database, clock)
    queue = InProcessQueue(
        context, on_dead_letter=dead_letters.keeper(database, clock), tasks=tasks()
    )
    yield Bench(folder, database, queue)
    queue.stop()


def _celery(broker: str, folder: Path, database: Database) -> Iterator[Bench]:
    prefix = f"test-{uuid.uuid4().hex[:10]}"
    app = make_app(broker, prefix=prefix, tasks=tasks(), visibility_timeout_s=VISIBILITY_S)
    bench = Bench(folder, database, CeleryQueue(app, tasks()))
    workers: list[subprocess.Popen[bytes]] = []
    wanted: dict[str, Any] = {
        "broker": broker,
        "prefix": prefix,
        "visibility_timeout_s": VISIBILITY_S,
        "beat_file": str(folder / "beat"),
    }

    def _start() -> None:
        command = [sys.executable, "-m", "tests.contracts.queue_tasks", json.dumps(wanted)]
        environment = {**os.environ, "TOLLHOUSE_TEST_FOLDER": str(folder), "C_FORCE_ROOT": "1"}
        with (folder / "worker.log").open("a") as log:
            workers.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, stderr=log, stdout=log, process_group=0
                )
            )

    def _kill() -> None:
        while workers:
            worker = workers.pop()
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait(10)

    bench.start, bench.kill = _start, _kill
    try:
        yield bench
    finally:
        _kill()
        _sweep(app, prefix)


def _sweep(app: Any, prefix: str) -> None:
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        for name in QUEUES:
            channel.queue_delete(f"{prefix}.{name}")
        client = getattr(channel, "client", None)
        if client is not None:
            for key in client.scan_iter(f"{prefix}:*"):
                client.delete(key)
    app.close()


def test_tasks_run_are_tried_again_die_and_are_replayed(bench: Bench) -> None:
    """One story, because a worker takes seconds to start."""
    bench.queue.enqueue("test.mark", word="before")
    bench.start()
    bench.queue.enqueue("test.mark", word="after")
    bench.queue.enqueue("test.fails_twice", word="again")
    bench.queue.enqueue("test.fails", word="never")
    bench.wait(lambda: {"before", "after"} <= set(bench.marks()))
    bench.wait(lambda: bench.marks().count("again") == 3)

    def _letters() -> list[tuple[str, dict[str, Any], int]]:
        with bench.database.read() as session:
            found = dead_letters.unreplayed(session)
            return [(each.task, each.arguments, each.attempts) for each in found]

    bench.wait(lambda: _letters() != [])
    assert _letters() == [("test.fails", {"word": "never"}, 3)]
    assert bench.marks().count("never") == 3
    (bench.folder / "mended").touch()
    assert dead_letters.replay(bench.database, SystemClock(), bench.queue) == 1
    bench.wait(lambda: bench.marks().count("never") == 4)
    assert _letters() == []
    bench.wait(lambda: bench.marks().count("tick") >= 2)


@pytest.mark.parametrize("bench", ["rabbitmq", "redis"], indirect=True)
def test_a_worker_killed_in_the_middle_loses_nothing(bench: Bench) -> None:
    for number in range(3):
        bench.queue.enqueue("test.slow", word=f"w{number}")
    bench.start()
    bench.wait(lambda: any(each.endswith("-began") for each in bench.marks()))
    bench.kill()
    # Redis gives a dead worker's tasks back to one that starts after the visibility time-out; those
    # that run look only every 100 s.
    time.sleep(VISIBILITY_S + 0.5)
    bench.start()
    wanted = {f"w{number}-done" for number in range(3)}
    bench.wait(lambda: wanted <= set(bench.marks()))


async def _silenced(proxy: SilentProxy) -> None:
    proxy.silence()


@pytest.fixture(params=["rabbitmq", "redis"])
def silent_broker(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """A broker behind a proxy in another thread: its own address, the proxy's, and what silences the
    connections."""
    is_rabbit = request.param == "rabbitmq"
    (need_rabbitmq if is_rabbit else need_redis)()
    direct = RABBITMQ if is_rabbit else REDIS
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def _wait(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(10)

    target = urlsplit(direct)
    assert target.hostname is not None
    proxy = SilentProxy((target.hostname, target.port or (5672 if is_rabbit else 6379)))
    try:
        _wait(proxy.__aenter__())
        host, port = proxy.address
        behind = direct.replace(target.netloc.rpartition("@")[2], f"{host}:{port}")
        yield direct, behind, lambda: _wait(_silenced(proxy))
        _wait(proxy.__aexit__())
        _wait(asyncio.sleep(0.2))  # the aborted connections close
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def test_a_message_sent_over_a_connection_that_went_silent_is_sent_again(
    silent_broker: tuple[str, str, Callable[[], None]], tmp_path: Path, sqlite_database: Database
) -> None:
    direct, broker, silence = silent_broker
    with contextmanager(_celery)(direct, tmp_path, sqlite_database) as bench:
        prefix = bench.queue._app.conf.tollhouse_prefix  # type: ignore[attr-defined]
        sender = CeleryQueue(make_app(broker, prefix=prefix, tasks=tasks()), tasks())
        sender.enqueue("test.mark", word="before")
        silence()
        sender.enqueue("test.mark", word="after")
        sender.stop()
        bench.start()
        bench.wait(lambda: {"before", "after"} <= set(bench.marks()), 30)


@pytest.mark.timeout(150)
def test_a_worker_and_its_schedule_recover_from_a_connection_that_went_silent(
    silent_broker: tuple[str, str, Callable[[], None]], tmp_path: Path, sqlite_database: Database
) -> None:
    direct, broker, silence = silent_broker
    with contextmanager(_celery)(broker, tmp_path, sqlite_database) as bench:
        bench.start()
        bench.wait(lambda: "tick" in bench.marks())
        silence()
        prefix = bench.queue._app.conf.tollhouse_prefix  # type: ignore[attr-defined]
        sender = CeleryQueue(make_app(direct, prefix=prefix, tasks=tasks()), tasks())
        if direct == RABBITMQ:  # Redis hands a message to the silent consumer, and it is lost
            sender.enqueue("test.mark", word="meanwhile")
            bench.wait(lambda: "meanwhile" in bench.marks())
        ticks = bench.marks().count("tick")
        bench.wait(lambda: bench.marks().count("tick") >= ticks + 5)
        sender.enqueue("test.mark", word="after")
        sender.stop()
        bench.wait(lambda: "after" in bench.marks())


def test_the_schedule_is_the_registry_s() -> None:
    entries = schedule(tasks(), "p")
    assert entries == {
        "test.tick": {
            "task": "test.tick",
            "schedule": 0.5,
            "options": {"queue": "p.exports", "expires": 1.0, "confirm_timeout": 5.0},
        }
    }


def test_every_task_has_a_queue_that_workers_serve() -> None:
    from billing import tasks as _billing
    from core.queue import TASKS

    assert _billing
    assert {each.queue for each in TASKS.values()} <= set(QUEUES)


def test_a_broker_that_is_none_is_refused() -> None:
    with pytest.raises(SettingError, match="BROKER_URL"):
        make_app("kafka://localhost")
