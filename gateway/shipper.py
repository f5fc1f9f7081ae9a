"""Takes what the spool holds to the database, in bulk, from a thread of its own.

Idempotent: rows are inserted by request id, and a batch is forgotten only after its commit. While
the database is down the spool grows and the shipper tries again; a single record that the database
refuses for good is parked with the reason, so that it holds up nothing behind it.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Protocol

from sqlalchemy.exc import DBAPIError, OperationalError

from core import metrics
from gateway.spool import Outgoing, Spool, connect, read_outbox

log = logging.getLogger("tollhouse.shipper")
BATCH = 5000
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


class Books(Protocol):
    """Where events go. One call is one transaction; a replay changes nothing."""

    def record(self, batch: Outgoing) -> None: ...


class Shipper:
    def __init__(self, spool: Spool, books: Books, *, pause_s: float = 0.05) -> None:
        self._spool = spool
        self._books = books
        self._pause_s = pause_s  # lets a batch gather
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tollhouse-shipper", daemon=True)
        self._shipped = 0
        self._ill_since: float | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """One more attempt to ship, then the end. What stays is adopted at the next start."""
        self._stopping.set()
        self._spool.arrived.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def backlog(self) -> int:
        row = self._spool.file.connection.execute("select count(*) from outbox").fetchone()
        return int(row[0])

    def _run(self) -> None:
        reader = connect(self._spool.file.path)
        pause = FIRST_PAUSE_S
        try:
            while True:
                last_round = self._stopping.is_set()
                try:
                    self._drain(reader)
                    self._ill_since = None
                    pause = FIRST_PAUSE_S
                except Exception as error:
                    log.warning(
                        "usage cannot be shipped now, again in %.1f s: %s", pause, _brief(error)
                    )
                    if last_round:
                        return
                    self._watch()
                    self._stopping.wait(pause)
                    pause = min(pause * 2, LONGEST_PAUSE_S)
                    continue
                if last_round:
                    return
                self._watch()
                self._spool.arrived.wait(1.0)
                self._stopping.wait(self._pause_s)
                self._spool.arrived.clear()
        finally:
            reader.close()

    def _watch(self) -> None:
        """For the alert on a database that has been away for long."""
        now = time.monotonic()
        waiting = self.backlog()
        if waiting and self._ill_since is None:
            self._ill_since = now
        metrics.spool_waiting.set(waiting)
        metrics.spool_age_seconds.set(now - self._ill_since if self._ill_since else 0)

    def _drain(self, reader: sqlite3.Connection) -> None:
        while True:
            batch = read_outbox(reader, BATCH, after=self._shipped)
            if not batch.last:
                return
            self._ship(reader, batch)
            self._shipped = batch.last
            self._spool.forget_shipped(batch.last)
            reader.execute("pragma wal_checkpoint(passive)")

    def _ship(self, reader: sqlite3.Connection, batch: Outgoing) -> None:
        try:
            self._books.record(batch)
        except OperationalError:
            raise
        except (DBAPIError, ValueError, LookupError) as error:
            log.error("a batch of usage was refused, trying one by one: %s", _brief(error))
            self._one_by_one(reader, batch)

    def _one_by_one(self, reader: sqlite3.Connection, batch: Outgoing) -> None:
        for seq in range(batch.first, batch.last + 1):
            single = read_outbox(reader, 1, after=seq - 1)
            if single.last != seq:
                continue
            try:
                self._books.record(single)
            except OperationalError:
                raise
            except (DBAPIError, ValueError, LookupError) as error:
                log.error("one record was refused and parked: %s", _brief(error))
                self._spool.park(seq, _brief(error))


def ship_file(connection: sqlite3.Connection, books: Books, forget: Callable[[int], None]) -> int:
    """Ship all of a dead process's outbox; returns how many rows went."""
    total, after = 0, 0
    while True:
        batch = read_outbox(connection, BATCH, after=after)
        if not batch.last:
            return total
        books.record(batch)
        forget(batch.last)
        after = batch.last
        total += len(batch.usage) + len(batch.moderation)


def _brief(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
