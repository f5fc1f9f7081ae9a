"""Faults of disk, database, broker and network. A seed decides each; healed, there are none."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session

from core.database import Database


class Crash(Exception):
    """The process died here. Whatever it had not committed is gone."""


class WorkerFailed(Exception):
    """A rating worker raised what no fault explains."""


@dataclass
class Faults:
    chance: random.Random
    rate: float = 0.15
    healed: bool = False
    seen: dict[str, int] = field(default_factory=dict)

    def strike(self, name: str, rate: float | None = None) -> bool:
        """Whether this fault happens now."""
        if self.healed or self.chance.random() >= (self.rate if rate is None else rate):
            return False
        self.seen[name] = self.seen.get(name, 0) + 1
        return True


class FaultyDatabase(Database):
    """Does not answer, dies in the middle of a transaction, or commits without telling."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.faults = Faults(random.Random(0), healed=True)
        self._statements_left: int | None = None
        event.listen(self.db_engine, "before_cursor_execute", self._count)
        fsync = _no_fsync_in_sqlite if self.dialect == "sqlite" else _no_fsync
        event.listen(self.db_engine, "connect", fsync)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        faults = self.faults
        if faults.strike("database down", 0.05):
            raise Crash("the database does not answer")
        if faults.strike("database dies in the middle", 0.08):
            self._statements_left = faults.chance.randint(1, 25)
        try:
            with super().transaction() as session:
                yield session
                if faults.strike("commit refused", 0.05):
                    raise Crash("the commit was refused")
        finally:
            self._statements_left = None
        if faults.strike("answer to commit lost", 0.05):
            raise Crash("committed, and nobody heard of it")

    def _count(self, *_: Any) -> None:
        if self._statements_left is None:
            return
        self._statements_left -= 1
        if self._statements_left <= 0:
            self._statements_left = None
            raise Crash("the connection broke")


def _no_fsync_in_sqlite(connection: Any, _record: object) -> None:
    connection.execute("pragma synchronous=off")  # a simulated crash loses no page cache


def _no_fsync(connection: Any, _record: object) -> None:
    connection.execute("set synchronous_commit = off")
    connection.commit()


@dataclass
class Wire:
    """Messages that may be lost, doubled, and come in any order; what is lost is sent again by who
    still waits for it."""

    faults: Faults
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def send(self, kind: str, **body: Any) -> None:
        if self.faults.strike("message lost"):
            return
        self.messages.append((kind, body))
        if self.faults.strike("message doubled"):
            self.messages.append((kind, body))

    def take(self) -> tuple[str, dict[str, Any]] | None:
        """Any message, not the first; it stays on the wire until it is acknowledged."""
        if not self.messages:
            return None
        return self.faults.chance.choice(self.messages)

    def acknowledge(self, message: tuple[str, dict[str, Any]]) -> None:
        if not self.faults.strike("acknowledgement lost"):
            self.messages.remove(message)
