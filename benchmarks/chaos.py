"""Fire: gateway, engines, a worker, PostgreSQL and Redis under load, and by a seeded plan each of them
killed, paused, restarted or cut off. After every round the books are audited.

`python -m benchmarks.chaos --rounds 50` needs PostgreSQL at TOLLHOUSE_TEST_POSTGRES (a database of its
own is made and dropped) and `redis-server` on the path (one of its own is started). A round's plan
depends on the seed and its number alone. Not done here: a full disk, and RabbitMQ as the broker.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.report import figure, progress
from tests.journeys.houses import Command, Seen, Served, serve, streams

POSTGRES = os.environ.get("TOLLHOUSE_TEST_POSTGRES", "postgresql://root@127.0.0.1:5432/postgres")
STREAMS = 16
RESULTS = Path(__file__).parent / "results" / "chaos.jsonl"


@dataclass
class Site:
    """Everything that runs, and how to bring it back."""

    folder: Path
    database: str
    redis_port: int
    redis: "subprocess.Popen[bytes] | None" = None
    worker: "subprocess.Popen[str] | None" = None
    house: Served | None = None
    paused: set[int] = field(default_factory=set)

    @property
    def command(self) -> Command:
        redis = f"redis://127.0.0.1:{self.redis_port}"
        settings = {
            "TOLLHOUSE_DATABASE_URL": POSTGRES.rpartition("/")[0] + f"/{self.database}",
            "TOLLHOUSE_REDIS_URL": f"{redis}/0",
            "TOLLHOUSE_BROKER_URL": f"{redis}/1",
            "TOLLHOUSE_ENGINES": "2",
            "TOLLHOUSE_LIMITS_WHEN_REDIS_DOWN": "local",
            "C_FORCE_ROOT": "1",
        }
        return Command(self.folder, settings)

    def start_all(self) -> None:
        """Start what does not run."""
        for pid in list(self.paused):
            _signal(pid, signal.SIGCONT)
        self.paused.clear()
        self.open_database(True)
        if self.redis is None or self.redis.poll() is not None:
            self.redis = _redis(self.folder, self.redis_port)
        if self.house is None or self.house.process.poll() is not None:
            self.house = serve(self.command)
        if self.worker is None or self.worker.poll() is not None:
            self.worker = self.command.start("worker", "--concurrency", "1")

    def stop_all(self) -> None:
        for pid in list(self.paused):
            _signal(pid, signal.SIGCONT)
        if self.house is not None and self.house.process.poll() is None:
            self.house.stop()
        for process in (self.worker, self.redis):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(30)

    def open_database(self, allowed: bool) -> None:
        """Let connections in, or cut all of them and let none in."""
        with psycopg.connect(POSTGRES, autocommit=True, connect_timeout=5) as admin:
            admin.execute(
                f"alter database {self.database} allow_connections {str(allowed).lower()}"
            )
            if not allowed:
                self._cut(admin)

    def cut_connections(self) -> None:
        with psycopg.connect(POSTGRES, autocommit=True, connect_timeout=5) as admin:
            self._cut(admin)

    def _cut(self, admin: "psycopg.Connection[Any]") -> None:
        admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s",
            (self.database,),
        )

    def pids(self) -> dict[str, int]:
        found = {}
        if self.house is not None and self.house.process.poll() is None:
            found["gateway"] = self.house.process.pid
            found |= {f"engine{n}": pid for n, pid in enumerate(self.house.children())}
        if self.worker is not None and self.worker.poll() is None:
            found["worker"] = self.worker.pid
        if self.redis is not None and self.redis.poll() is None:
            found["redis"] = self.redis.pid
        return found


@dataclass(frozen=True)
class Fault:
    after_s: float
    act: str  # kill | pause | cut | outage
    part: str  # gateway | engine0 | engine1 | worker | redis | database


def plan(seed: int, number: int) -> list[Fault]:
    chance = random.Random(f"{seed}-{number}")
    faults = []
    for _ in range(chance.randint(1, 3)):
        part = chance.choice(["gateway", "engine0", "engine1", "worker", "redis", "database"])
        acts = ["cut", "outage"] if part == "database" else ["kill", "pause"]
        faults.append(Fault(round(chance.uniform(0.3, 4.0), 2), chance.choice(acts), part))
    return sorted(faults, key=lambda fault: fault.after_s)


def strike(site: Site, fault: Fault) -> None:
    if fault.part == "database":
        if fault.act == "cut":
            site.cut_connections()
        else:
            site.open_database(False)
            threading.Timer(2.0, site.open_database, (True,)).start()
        return
    pid = site.pids().get(fault.part)
    if pid is None:
        return
    if fault.act == "kill":
        _signal(pid, signal.SIGKILL)
    else:
        site.paused.add(pid)
        _signal(pid, signal.SIGSTOP)
        threading.Timer(1.5, _signal, (pid, signal.SIGCONT)).start()


def play(site: Site, faults: list[Fault]) -> dict[str, Any]:
    """One round: load, faults, recovery, audit."""
    assert site.house is not None
    timers = [threading.Timer(fault.after_s, strike, (site, fault)) for fault in faults]
    for timer in timers:
        timer.start()
    seen = asyncio.run(streams(site.house, STREAMS, max_tokens=200))
    for timer in timers:
        timer.join()
    time.sleep(2.5)  # the last pause or outage ends by itself
    began = time.monotonic()
    _until(lambda: _answers(site), 120, "no answer after the faults")
    recovery = time.monotonic() - began
    report = _audit(site)
    return {
        "answered": sum(each.usage is not None for each in seen),
        "broken": sum(each.usage is None for each in seen),
        "events": report["steps"]["events"]["count"],
        "lost": report["lost"],
        "duplicated": report["duplicated"],
        "ledger_error": report["ledger_error"],
        "differences": len(report["differences"]),
        "wrong_usage": _wrong(site, seen),
        "recovery_seconds": round(recovery, 2),
    }


def _answers(site: Site) -> bool:
    site.start_all()
    assert site.house is not None
    return asyncio.run(streams(site.house, 1, max_tokens=4))[0].usage is not None


def _audit(site: Site) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def _settled() -> bool:
        nonlocal found
        done = site.command.run("audit", "--json")
        if not done.stdout:
            return False
        found = json.loads(done.stdout)
        return not found["spool"]["running"] and not found["spool"]["unshipped"]

    _until(_settled, 120, "requests stay open in a spool")
    return found


def _wrong(site: Site, seen: list[Seen]) -> int:
    """Answers whose usage, as the client was told it, is not on the event."""
    address = POSTGRES.rpartition("/")[0] + f"/{site.database}"
    with psycopg.connect(address, connect_timeout=5) as connection:
        rows = connection.execute(
            "select request_id, input_tokens, output_tokens from usage_events"
        )
        events = {row[0]: (row[1], row[2]) for row in rows}
    return sum(
        events.get(each.request_id)
        != (each.usage["prompt_tokens"], each.usage["completion_tokens"])
        for each in seen
        if each.usage is not None
    )


def _until(done: Callable[[], bool], seconds: float, problem: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit(problem)
        time.sleep(0.5)


def _redis(folder: Path, port: int) -> "subprocess.Popen[bytes]":
    command = ["redis-server", "--port", str(port), "--dir", str(folder), "--save", ""]
    started = subprocess.Popen(
        [*command, "--appendonly", "yes"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _until(lambda: _listens(port), 10, "redis-server does not start")
    return started


def _listens(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.settimeout(0.5)
        return attempt.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is not on the path; install it to run this benchmark")
    database = f"tollhouse_chaos_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(POSTGRES, autocommit=True, connect_timeout=5) as admin:
        admin.execute(f"create database {database}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), database, _free_port())
        try:
            site.start_all()
            for number in range(wanted.first, wanted.first + wanted.rounds):
                faults = plan(wanted.seed, number)
                row = {"seed": wanted.seed, "round": number} | play(site, faults)
                row["faults"] = [f"{each.after_s} s {each.act} {each.part}" for each in faults]
                rows.append(row)
                progress(json.dumps(row))
                RESULTS.parent.mkdir(exist_ok=True)
                with RESULTS.open("a") as kept:
                    kept.write(json.dumps(row) + "\n")
        finally:
            site.stop_all()
            with psycopg.connect(POSTGRES, autocommit=True, connect_timeout=5) as admin:
                admin.execute(f"drop database if exists {database} with (force)")
    bad = sum(bool(row["differences"] or row["wrong_usage"]) for row in rows)
    settings = {"rounds": len(rows), "seed": wanted.seed, "streams": STREAMS}
    figure("chaos.bad_rounds", bad, "rounds", False, at_least=0, aim=0, settings=settings)
    slowest = max((row["recovery_seconds"] for row in rows), default=0.0)
    figure("chaos.slowest_recovery", slowest, "s", False, settings=settings)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
