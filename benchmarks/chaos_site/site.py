"""Two gateways, two engines and two workers; a Redis of its own, and PostgreSQL and RabbitMQ behind
proxies, of its own or given.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg

from benchmarks.chaos_site.clock import ShiftedClock
from benchmarks.chaos_site.proxy import Proxy
from benchmarks.chaos_site.servers import (
    Postgres,
    RabbitMQ,
    Redis,
    Server,
    postgres_programs,
    rabbitmq_program,
)
from benchmarks.report import progress
from tests.journeys.deployments import (
    Command,
    RunningGateway,
    free_port,
    reap,
    serve,
    start_engine,
    start_worker,
    sweep,
)
from tests.small_disk import free, mounted

GATEWAYS = ("gateway0", "gateway1")
# File systems of their own, that can really be full: of a gateway's data, and of the engines'.
SMALL_DISKS = {"disk of gateway0": "gateway0", "disk of engines": "engines"}
_DISK_MB = 256
WORKERS = {"worker0": (), "worker1": ("--no-beat",)}
POSTGRES = os.environ.get("TOLLHOUSE_TEST_POSTGRES", "postgresql://root@127.0.0.1:5432/postgres")
RABBITMQ = os.environ.get("TOLLHOUSE_TEST_RABBITMQ", "amqp://guest:guest@127.0.0.1:5672")


@dataclass
class Site:
    """Everything that runs, and how to bring it back."""

    folder: Path
    books: str  # address of the database, past the proxy
    proxies: dict[str, Proxy]  # database, queue
    prefix: str
    servers: dict[str, Server]  # redis; postgres and rabbitmq where they are its own
    broker: str  # past the proxy
    clock: ShiftedClock
    places: list[str] = field(
        default_factory=lambda: [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    )
    gateways: dict[str, RunningGateway] = field(default_factory=dict)
    running: dict[str, "subprocess.Popen[str]"] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    small_disks: set[str] = field(default_factory=set)

    def disk(self, name: str) -> Path:
        """One of SMALL_DISKS."""
        return self.folder / SMALL_DISKS[name]

    def spool(self, gateway: str) -> Path:
        """The data directory of a gateway, as on a machine of its own."""
        return self.folder / gateway

    def command(self, folder: Path) -> Command:
        folder.mkdir(exist_ok=True)
        return Command(
            folder,
            {
                "TOLLHOUSE_DATABASE_URL": _through(self.books, self.proxies["database"]),
                "TOLLHOUSE_REDIS_URL": f"redis://127.0.0.1:{self.servers['redis'].port}/0",
                "TOLLHOUSE_BROKER_URL": _through(self.broker, self.proxies["queue"]),
                "TOLLHOUSE_UPSTREAMS": " ".join(self.places),
                "TOLLHOUSE_LIMITS_WHEN_REDIS_DOWN": "local",
            }
            | self.clock.environment,
        )

    def start_all(self) -> None:
        """Heal what is struck, and start what does not run, at once."""
        for pid in list(self.paused):
            send(pid, signal.SIGCONT)
        self.paused.clear()
        for proxy in self.proxies.values():
            proxy.up()
        for name in self.small_disks:
            free(self.disk(name))
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(Server.start, self.servers.values()))
        command, engines = self.command(self.folder), self.command(self.folder / "engines")
        first, *others = GATEWAYS
        with ThreadPoolExecutor(3) as pool:
            begun = [
                pool.submit(self._start, f"engine{number}", partial(start_engine, engines, place))
                for number, place in enumerate(self.places)
            ]
            begun.append(pool.submit(self._start_gateway, first))  # makes the tables
            for each in begun:
                each.result()  # raises what hindered it
        for name in others:
            self._start_gateway(name)
        for name, options in WORKERS.items():
            self._start(name, partial(start_worker, command, self.prefix, *options))

    def stop_all(self) -> None:
        for pid in list(self.paused):
            send(pid, signal.SIGCONT)
        for gateway in self.gateways.values():
            gateway.stop()
        for name, process in self.running.items():
            if process.poll() is None:
                if name in WORKERS:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.terminate()
            reap(process)

    def pids(self) -> dict[str, int]:
        found = {name: each.pid for name, each in self.running.items() if each.poll() is None}
        for name, server in self.servers.items():
            if server.process is not None and server.runs:
                found[name] = server.process.pid
        for name, gateway in self.gateways.items():
            if gateway.process.poll() is None:
                found[name] = gateway.process.pid
        return found

    def _start(self, name: str, start: Callable[[], "subprocess.Popen[str]"]) -> None:
        before = self.running.get(name)
        if before is not None:
            if before.poll() is None:
                return
            reap(before)
            if name in WORKERS:  # what its parent left
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(before.pid, signal.SIGKILL)
        self.running[name] = start()

    def _start_gateway(self, name: str) -> None:
        before = self.gateways.get(name)
        if before is not None:
            if before.process.poll() is None:
                return
            before.kill()  # closes its pipes
        self.gateways[name] = serve(self.command(self.spool(name)))


@contextlib.contextmanager
def site_in(folder: Path, *, own_servers: bool = False) -> Iterator[Site]:
    """A site with a database and queues of its own, that runs; nothing of it is left. With
    `own_servers` PostgreSQL and RabbitMQ are its own too, where they are installed, so that they may
    be killed; else those that are given are used.
    """
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is not on the path; install it to run this benchmark")
    with tempfile.TemporaryDirectory(prefix="fire-") as place, contextlib.ExitStack() as stack:
        servers = _servers(Path(place), own_servers)
        for each in servers.values():
            stack.callback(each.stop)
        for each in servers.values():
            each.start()
        postgres, rabbitmq = servers.get("postgres"), servers.get("rabbitmq")
        admin = postgres.address if isinstance(postgres, Postgres) else POSTGRES
        broker = rabbitmq.address if isinstance(rabbitmq, RabbitMQ) else RABBITMQ
        books = stack.enter_context(_database(admin))
        tables = stack.enter_context(Proxy(*_place(books, 5432)))
        queue = stack.enter_context(Proxy(*_place(broker, 5672)))
        prefix = f"fire-{uuid.uuid4().hex[:8]}"
        proxies, clock = {"database": tables, "queue": queue}, ShiftedClock(folder)
        site = Site(folder, books, proxies, prefix, servers, broker, clock)
        for name in SMALL_DISKS:
            if stack.enter_context(mounted(site.disk(name), _DISK_MB)):
                site.small_disks.add(name)
            else:
                progress(f"the {name} is not filled: only root may mount a file system of its own")
        try:
            site.start_all()
            yield site
        finally:
            site.stop_all()
            if rabbitmq is None:
                sweep(prefix, broker)


def _servers(place: Path, own: bool) -> dict[str, Server]:
    place.chmod(0o755)  # PostgreSQL goes through it as another user
    kinds: dict[str, type[Server]] = {"redis": Redis}
    if own and postgres_programs() is not None:
        kinds["postgres"] = Postgres
    if own and rabbitmq_program() is not None:
        kinds["rabbitmq"] = RabbitMQ
    for name in ("postgres", "rabbitmq"):
        if own and name not in kinds:
            progress(f"{name} is not installed here: the given one is used, and is not killed")
    made = {}
    for name, kind in kinds.items():
        (place / name).mkdir()
        made[name] = kind(place / name)
    return made


@contextlib.contextmanager
def _database(admin: str) -> Iterator[str]:
    """An empty one; gone afterwards, with its server if that is the site's own."""
    name = f"tollhouse_chaos_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(admin, autocommit=True, connect_timeout=5) as link:
        link.execute(f"create database {name}")
    yield admin.rpartition("/")[0] + f"/{name}"
    with (
        contextlib.suppress(psycopg.OperationalError),
        psycopg.connect(admin, autocommit=True, connect_timeout=5) as link,
    ):
        link.execute(f"drop database if exists {name} with (force)")


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def later(seconds: float, act: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


def until(done: Callable[[], bool], seconds: float, problem: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit(problem)
        time.sleep(0.2)


def _place(address: str, usual: int) -> tuple[str, int]:
    parts = urlsplit(address)
    return parts.hostname or "127.0.0.1", parts.port or usual


def _through(address: str, proxy: Proxy) -> str:
    parts = urlsplit(address)
    who = parts.netloc.rpartition("@")[0]
    place = f"127.0.0.1:{proxy.port}"
    return urlunsplit(parts._replace(netloc=f"{who}@{place}" if who else place))
