"""Counts records in the spool files on this machine, without taking their locks.

What a file's logs hold is read before its tables, which say in the same read which logs they have
already: each record is counted once, whatever the owner does meanwhile.
"""

import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.settings import Settings
from gateway.metering.spool_log import logs_of, read_log
from gateway.metering.spool_records import OPENED, request_id_of
from gateway.metering.spool_statements import (
    DELETE_OPENED,
    DELETE_ROW,
    DELETE_SHIPPED,
    INSERT_OPENED,
    INSERT_OUTBOX,
    LOGGED,
    Operation,
    decode_operations,
)
from gateway.metering.streams.storing import wait_for_stream


@dataclass(frozen=True, slots=True)
class SpoolCounts:
    running: int = 0  # open requests
    unshipped: int = 0  # ended requests that are not in the database yet
    parked: int = 0  # refused permanently by the database
    oldest: float | None = None  # oldest change of a file with unshipped records, Unix seconds


def spool_counts(settings: Settings) -> SpoolCounts:
    running = unshipped = parked = 0
    changed: list[float] = []
    for path in sorted((settings.data_dir / "spool").glob("*.db")):
        try:
            counted = _counts(path)
            if counted[1]:
                changed.append(path.stat().st_mtime)
        except (sqlite3.Error, FileNotFoundError):
            continue  # its owner has just removed it
        running, unshipped, parked = (
            running + counted[0],
            unshipped + counted[1],
            parked + counted[2],
        )
    return SpoolCounts(running, unshipped, parked, min(changed, default=None))


def wait_until_shipped(settings: Settings, timeout_s: float = 5.0) -> SpoolCounts:
    """Wait briefly for the shippers and the stream, so that a command sees requests that just ended."""
    deadline = time.monotonic() + timeout_s
    while (counts := spool_counts(settings)).unshipped and time.monotonic() < deadline:
        time.sleep(0.05)
    wait_for_stream(settings, max(0.0, deadline - time.monotonic()))
    return counts


def requests_in_spools(settings: Settings) -> frozenset[str]:
    """Requests that run, or whose usage is not in the database yet, on this machine."""
    found: set[str] = set()
    for path in sorted((settings.data_dir / "spool").glob("*.db")):
        try:
            logged = _logged(_read_logs(path), 0)
            with closing(_open(path)) as connection:
                for topic, body in connection.execute(
                    "select ?, body from opened union all select topic, body from outbox"
                    " union all select topic, body from parked",
                    (OPENED,),
                ):
                    found.add(request_id_of(topic, body))
        except (sqlite3.Error, FileNotFoundError):
            continue  # its owner has just removed it
        found |= logged.opened
        found.update(request_id_of(topic, body) for topic, body in logged.outbox.values())
    return frozenset(found)


@dataclass(slots=True)
class _Logged:
    """What logs change in the tables."""

    opened: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)  # requests that the tables have as open
    outbox: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    shipped: int = 0  # all rows up to this one
    parked: int = 0  # rows of `outbox` that were parked
    parked_rows: set[int] = field(default_factory=set)  # of the tables, those that they have

    def add(self, sql: str, values: tuple[Any, ...]) -> None:
        if sql == INSERT_OPENED:
            self.opened.add(values[0])
        elif sql == DELETE_OPENED and values[0] in self.opened:
            self.opened.remove(values[0])
        elif sql == DELETE_OPENED:
            self.ended.add(values[0])
        elif sql == INSERT_OUTBOX:
            self.outbox[values[0]] = values[1:]
        elif sql == DELETE_SHIPPED:
            self.shipped = max(self.shipped, values[0])
            self.outbox = {row: each for row, each in self.outbox.items() if row > values[0]}
        elif sql == DELETE_ROW and self.outbox.pop(values[0], None) is not None:
            self.parked += 1
        elif sql == DELETE_ROW and values[0] > self.shipped:
            self.parked_rows.add(values[0])


def _logged(logs: Iterable[tuple[int, list[Operation]]], folded: int) -> _Logged:
    """Of the logs after the one that the tables have."""
    found = _Logged()
    for number, operations in logs:
        if number > folded:
            for kind, values in operations:
                found.add(LOGGED[kind], values)
    return found


def _read_logs(path: Path) -> list[tuple[int, list[Operation]]]:
    found = []
    for number, log in logs_of(path):
        # Its owner has just folded it, or it is of another version, as who adopts it says.
        with suppress(FileNotFoundError, ValueError):
            found.append((number, decode_operations(read_log(log)[0])))
    return found


def _counts(path: Path) -> tuple[int, int, int]:
    logs = _read_logs(path)
    with closing(_open(path)) as connection:
        connection.execute("begin")  # all of one moment
        logged = _logged(logs, _folded(connection))
        open_in_table = {row[0] for row in connection.execute("select request_id from opened")}
        rows = "select count(*) from outbox where seq > ?"
        [(unshipped,)] = connection.execute(rows, (logged.shipped,))
        [(parked,)] = connection.execute("select count(*) from parked")
        taken = [seq for seq in logged.parked_rows if _has_row(connection, seq)]
    running = len((open_in_table - logged.ended) | logged.opened)
    left = unshipped - len([seq for seq in taken if seq > logged.shipped])
    return running, left + len(logged.outbox), parked + logged.parked + len(taken)


def _has_row(connection: sqlite3.Connection, seq: int) -> bool:
    return connection.execute("select 1 from outbox where seq = ?", (seq,)).fetchone() is not None


def _folded(connection: sqlite3.Connection) -> int:
    """The number of the last log that the tables have."""
    [(number,)] = connection.execute("select log from folded")
    return int(number)


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=2, isolation_level=None)
