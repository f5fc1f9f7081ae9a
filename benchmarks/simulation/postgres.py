"""A stage on PostgreSQL, whose usage is rated by real processes beside the world's other steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg

from benchmarks.simulation.faults import Faults, FaultyDatabase
from benchmarks.simulation.rating_processes import KILLED, RATED, Order, RatingProcess
from billing.rating.shards import LEASE
from billing.usage import partitions
from core.clock import FakeClock

_PAST_LEASE_S = LEASE.total_seconds() + 1
_FAULTY = "rating worker's database fails"
_STRUCK = 0.6  # of the orders
_MOST_STATEMENTS = 25  # of one order, about


class Witness:
    """A connection of its own that no fault strikes; it takes and gives what SQLite's does."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True, options="-c timezone=UTC")

    def execute(self, query: str, keys: Sequence[Any] = ()) -> "_Found":
        cursor = self._connection.execute(query.replace("?", "%s"), tuple(keys))
        return _Found([column.name for column in cursor.description or ()], cursor.fetchall())

    def close(self) -> None:
        self._connection.close()


class _Found:
    def __init__(self, names: list[str], rows: list[tuple[Any, ...]]) -> None:
        self.description = [(name,) for name in names]
        self._rows = [tuple(map(_as_in_sqlite, row)) for row in rows]

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self._rows

    def fetchone(self) -> tuple[Any, ...] | None:
        return self._rows[0] if self._rows else None

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._rows)


def _as_in_sqlite(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).replace(tzinfo=None).isoformat(" ")
    if isinstance(value, Decimal):
        return int(value)
    return value


@dataclass
class PostgresStage:
    """A database that is made anew from a migrated one for each world, and its rating workers."""

    folder: Path
    server: str  # the URL of a database on it
    template: str  # the name of a migrated database
    workers: int = 2
    name: str = field(default_factory=lambda: f"tollhouse_simulation_{uuid4().hex[:8]}")
    database: FaultyDatabase = field(init=False)
    processes: list[RatingProcess] = field(init=False)
    rates_more: int = 8

    def __post_init__(self) -> None:
        self.spools = self.folder / "spool"
        self.url = f"{self.server.rpartition('/')[0]}/{self.name}"
        self.database = FaultyDatabase(self.url)
        self.processes = [RatingProcess(self.url) for _ in range(self.workers)]

    def clear(self) -> Witness:
        for process in self.processes:
            if process.is_busy():  # of a world that broke
                process.end()
        self._drop()
        with psycopg.connect(self.server, autocommit=True) as admin:
            admin.execute(f"create database {self.name} template {self.template}")
        self.spools.mkdir(exist_ok=True)
        for stale in self.spools.iterdir():
            stale.unlink()
        return Witness(self.url)

    def close(self) -> None:
        for process in self.processes:
            process.end()
        self._drop()

    def _drop(self) -> None:
        self.database.close()
        with psycopg.connect(self.server, autocommit=True) as admin:
            admin.execute(f"drop database if exists {self.name} with (force)")

    def rate(self, clock: FakeClock, faults: Faults, most_events: int) -> None:
        """Every worker begins to rate what waits; one of them may be killed or stand still."""
        self.join(clock)
        self._faults = faults
        orders = [
            Order(clock.now(), most_events, faults.chance.random(), faults.strike(_FAULTY, 0.3))
            for _ in self.processes
        ]
        struck = faults.chance.randrange(len(orders))
        if not faults.healed and faults.chance.random() < _STRUCK:
            orders[struck].signal_at = faults.chance.randint(1, _MOST_STATEMENTS)
            orders[struck].kills = faults.chance.random() < 0.5
        for process, order in zip(self.processes, orders, strict=True):
            process.begin(order)
        if orders[struck].signal_at and not orders[struck].kills:
            self._outlast(self.processes[struck], clock)

    def rate_beside(self, clock: FakeClock) -> None:
        self.join(clock)
        for process in self.processes:
            process.begin(_calm(clock))

    def join(self, clock: FakeClock) -> None:
        """The leases of a worker that died run out before the next work."""
        ended = [process.finish() for process in self.processes]
        for end in ended:
            if end == KILLED:
                self._saw("rating worker killed")
        if any(end != RATED for end in ended):
            clock.advance(seconds=_PAST_LEASE_S)

    def _outlast(self, process: RatingProcess, clock: FakeClock) -> None:
        """If it stops, its leases run out, and the others may take its shards before it goes on."""
        if not process.stops():
            return
        self._saw("rating worker stands still past its lease")
        others = [each for each in self.processes if each is not process]
        for each in others:
            each.finish()
        clock.advance(seconds=_PAST_LEASE_S)
        for each in others:
            each.begin(_calm(clock))
        for each in others:
            each.finish()
        process.go_on()

    def _saw(self, fault: str) -> None:
        self._faults.seen[fault] = self._faults.seen.get(fault, 0) + 1

    def time_passed(self, clock: FakeClock) -> None:
        """A daily task makes partitions long before they are needed."""
        healed, self.database.faults.healed = self.database.faults.healed, True
        with self.database.transaction() as session:
            partitions.ensure_ahead(session, clock.now())
        self.database.faults.healed = healed


def _calm(clock: FakeClock) -> Order:
    return Order(clock.now(), 20_000, seed=0.0, faulty=False)


@contextmanager
def migrated_database(server: str) -> Iterator[str]:
    """The name of a migrated database, as a template."""
    from core.database import Database
    from migrations.run import upgrade

    name = f"tollhouse_simulation_{uuid4().hex[:8]}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(f"create database {name}")
    database = Database(f"{server.rpartition('/')[0]}/{name}")
    upgrade(database)
    database.close()
    try:
        yield name
    finally:
        with psycopg.connect(server, autocommit=True) as admin:
            admin.execute(f"drop database if exists {name} with (force)")
