"""What a world is played on: a folder for spools, a database that is made anew, and rating workers."""

import shutil
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.simulation.faults import Faults, FaultyDatabase
from billing.rating import rating
from core.clock import FakeClock
from tests.billing.simulation.rows import Books


class Stage(Protocol):
    """Worlds are played on it one after the other: compiled statements are kept from one to the
    next."""

    spools: Path
    database: FaultyDatabase
    rates_more: int  # how often workers rate, beside what messages tell them

    def clear(self) -> Books:
        """A new world's database; returns a connection that no fault strikes."""
        ...

    def close(self) -> None: ...

    def rate(self, clock: FakeClock, faults: Faults, most_events: int) -> None:
        """Let the rating workers begin."""
        ...

    def rate_beside(self, clock: FakeClock) -> None:
        """Let them rate beside the next step, without a fault of theirs."""
        ...

    def join(self, clock: FakeClock) -> None:
        """Wait for them: before time leaps, and before the books are read twice."""
        ...

    def time_passed(self, clock: FakeClock) -> None: ...


@dataclass
class SqliteStage:
    """A file, which has one writer: usage is rated by the world's own process."""

    folder: Path
    template: Path  # a migrated SQLite file
    database: FaultyDatabase = field(init=False)
    rates_more: int = 0

    def __post_init__(self) -> None:
        self.spools = self.folder / "spool"
        self.database = FaultyDatabase(f"sqlite:///{self.folder / 'books.db'}")

    def clear(self) -> Books:
        self.database.db_engine.dispose()  # closed, it would keep no connection for the next world
        for stale in self.folder.glob("*.db*"):
            stale.unlink()
        shutil.rmtree(self.spools, ignore_errors=True)
        self.spools.mkdir()
        shutil.copy(self.template, self.folder / "books.db")
        return sqlite3.connect(self.folder / "books.db", isolation_level=None)

    def close(self) -> None:
        self.database.close()

    def rate(self, clock: FakeClock, _: Faults, most_events: int) -> None:
        with self.database.transaction() as session:
            rating.rate(session, clock, most_events=most_events)

    def rate_beside(self, _: FakeClock) -> None:
        return

    def join(self, _: FakeClock) -> None:
        return

    def time_passed(self, _: FakeClock) -> None:
        return
