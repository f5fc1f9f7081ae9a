"""Ships the spool's records to the database in bulk, from a thread, which under load delegates to a
child process.

Shipping is idempotent: rows are inserted by request id, and a batch leaves the spool only after its
commit. While the database is down the spool grows and the shipper retries. A record that can never be
stored is parked with the reason, so that it does not block the others.
"""

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable

from core import metrics
from gateway.metering.batch_shippers import (
    BatchShipper,
    InlineShipper,
    ProcessShipper,
    refused_rows,
)
from gateway.metering.parked_records import brief
from gateway.metering.spool import Spool, connect, count_parked
from gateway.metering.spool_statements import Statement, delete_shipped, move_to_parked
from gateway.metering.usage_sink import UsageSink

log = logging.getLogger("tollhouse.shipper")
BATCH = 5000
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
# A round takes a few milliseconds of CPU for one record as for a hundred, so under load rounds are
# spaced to use this share of the process's time.
_SHARE = 0.01
_LONGEST_GATHER_S = 1.5
_CATCH_UP_S = 0.02
_MANY = 600  # rows in one round from which on the helper process ships; light load starts none


class Shipper:
    def __init__(
        self,
        spool: Spool,
        sink: UsageSink,
        process_shipper: ProcessShipper | None = None,
        *,
        pause_s: float = 0.05,
    ) -> None:
        self._spool = spool
        self._sink = sink
        self._process_shipper = process_shipper
        self._under_load = False
        self._pause_s = pause_s  # at least this long between rounds, so that records accumulate
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tollhouse-shipper", daemon=True)
        self._shipped = 0
        self._cpu_s = 0.0  # CPU seconds of this round
        self._failing_since: float | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Make a last attempt to ship, then stop. What remains is adopted at the next start."""
        self._stopping.set()
        self._spool.arrived.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def backlog(self) -> int:
        """The number of records that wait, without reading them."""
        return self._spool.file.waiting

    async def catch_up(self) -> None:
        """Returns once what the spool holds now is in the database. Call it in the spool's loop."""
        self._spool.flush()
        [(last,)] = self._spool.file.connection.execute("select coalesce(max(seq), 0) from outbox")
        while self._shipped < last:
            self._spool.arrived.set()
            await asyncio.sleep(_CATCH_UP_S)

    def _run(self) -> None:
        reader = connect(self._spool.file.path)
        pause = FIRST_PAUSE_S
        try:
            while True:
                last_round = self._stopping.is_set()
                self._cpu_s = 0.0
                try:
                    self.drain(reader, whole=last_round)
                    self._failing_since = None
                    pause = FIRST_PAUSE_S
                except Exception as error:
                    log.warning("cannot ship usage; retrying in %.1f s: %s", pause, brief(error))
                    if last_round:
                        return
                    _checkpoint(reader)  # or the WAL would hold every version of a page
                    self._update_metrics(reader)
                    self._stopping.wait(pause)
                    pause = min(pause * 2, LONGEST_PAUSE_S)
                    continue
                if last_round:
                    return
                self._update_metrics(reader)
                self._spool.arrived.wait(1.0)
                gather = self._cpu_s / _SHARE
                self._stopping.wait(min(max(gather, self._pause_s), _LONGEST_GATHER_S))
                self._spool.arrived.clear()
        finally:
            reader.close()
            if self._process_shipper is not None:
                self._process_shipper.close()

    def _update_metrics(self, reader: sqlite3.Connection) -> None:
        """Update the metrics behind the alert on a database that is down. The file's own connection is
        the event loop's, which would wait for this thread's query."""
        now = time.monotonic()
        waiting = self.backlog()
        if waiting and self._failing_since is None:
            self._failing_since = now
        metrics.spool_waiting.set(waiting)
        with contextlib.suppress(sqlite3.Error):  # of a full disk: the thread must outlive it
            metrics.spool_parked.set(count_parked(reader))
        metrics.spool_age_seconds.set(now - self._failing_since if self._failing_since else 0)

    def drain(self, reader: sqlite3.Connection, *, whole: bool) -> None:
        """Ship the outbox. Unless `whole`, records that arrive meanwhile wait for the next round,
        since shipping a few costs as much as shipping many."""
        try:
            self._spool.file.fold()
        finally:  # on a full disk too, the database gets what the tables hold
            self._ship_tables(reader, whole=whole)

    def _ship_tables(self, reader: sqlite3.Connection, *, whole: bool) -> None:
        inline = InlineShipper(reader, self._sink)
        while True:
            shipper: BatchShipper = (
                self._process_shipper
                if self._under_load and self._process_shipper is not None
                else inline
            )
            shipped_batch = shipper.ship(self._shipped, BATCH)
            if not shipped_batch.last:
                self._spool.file.shrink()
                return
            self._cpu_s += shipped_batch.cpu_s
            self._under_load |= shipped_batch.rows >= _MANY
            if shipped_batch.refused:
                for seq, reason in refused_rows(shipper, shipped_batch):
                    self._spool.park(seq, reason)
            self._shipped = shipped_batch.last
            self._spool.forget_shipped(shipped_batch.last)
            _checkpoint(reader)
            if not whole and shipped_batch.last - shipped_batch.first + 1 < BATCH:
                return


def _checkpoint(reader: sqlite3.Connection) -> None:
    with contextlib.suppress(sqlite3.Error):  # on a full disk: a later one will do
        reader.execute("pragma wal_checkpoint(passive)")


def ship_file(
    connection: sqlite3.Connection,
    sink: UsageSink,
    commit: Callable[[list[Statement]], None],
) -> int:
    """Ship the whole outbox of an adopted file; returns the number of records that were shipped."""
    total, after = 0, 0
    shipper = InlineShipper(connection, sink)
    while (batch := shipper.ship(after, BATCH)).last:
        statements: list[Statement] = []
        if batch.refused:
            for seq, reason in refused_rows(shipper, batch):
                statements += move_to_parked(seq, reason)
        commit([*statements, delete_shipped(batch.last)])
        after = batch.last
        total += batch.rows
    return total
