"""The durable spool: one SQLite file (WAL) per process with an append-only log in front of it, written
before the first token is sent and at the end of the request.

Records of one turn of the event loop are one frame of the log (`spool_log.py`), which takes a quarter
of the time of a transaction. The shipper's thread folds the log into the tables, from which it ships,
at each of its rounds: a log is applied and noted as folded in one transaction, and then removed, so a
process that is killed in between loses nothing and repeats nothing. Neither the log nor the WAL (in
`normal` mode, which leaves the fsync to the checkpoint) is synced for each record: a killed process
loses nothing; a power failure may lose what was written since the last checkpoint.

`opened` holds running requests, `outbox` holds records to ship to the database, and `parked` holds
records that cannot be read, settled or stored.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from core.errors import Unavailable
from core.events import EngineCount, ModerationEvent, OpenedRequest, UsageEvent
from gateway.metering.delivered import (
    DeliveredCounts,
    StreamCount,
    delivered_path,
    read_delivered,
)
from gateway.metering.spool_log import (
    REFUSALS,
    AppendLog,
    Execute,
    apply_singly,
    apply_together,
    keep_damaged,
    log_path,
    logs_of,
    read_log,
)
from gateway.metering.spool_records import OutboxRow, opened_decoder
from gateway.metering.spool_statements import (
    Operation,
    Statement,
    decode_operations,
    delete_shipped,
    encode_operations,
    insert_moderation,
    insert_opened,
    insert_receipt,
    move_to_outbox,
    move_to_parked,
    operations_of,
    park_opened,
    update_opened,
)

# Bytes that are left to the records of admitted requests, and to folding and shrinking: a spool that
# has filled its disk to the last byte, while the database was away, could never empty itself.
RESERVE = 64 * 2**20


def has_room(folder: str, reserve: int) -> bool:
    found = os.statvfs(folder)
    return not found.f_blocks or found.f_bavail * found.f_frsize >= reserve


def no_room() -> Unavailable:
    return Unavailable(
        "The gateway cannot record usage on its disk, so it accepts no new requests.",
        next_step="Free disk space in TOLLHOUSE_DATA_DIR; pending records are then written.",
        code="spool_unavailable",
        retry_after_s=5.0,
    )


def shrink(connection: sqlite3.Connection, most: int) -> None:
    """Where more than `most` bytes of the file, and most of it, are free, give them back."""
    pages, free, size = (
        int(connection.execute(f"pragma {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    if free * size > most and free > pages // 2:
        connection.execute("vacuum")
        connection.execute("pragma wal_checkpoint(truncate)")


log = logging.getLogger("tollhouse.spool")

_RETRY_S = 1.0
_SCHEMA = """
create table if not exists opened (request_id text primary key, body blob not null) without rowid;
create table if not exists outbox (
    seq integer primary key, topic text not null, body blob not null);
create table if not exists parked (
    seq integer primary key autoincrement, topic text not null, body blob not null,
    reason text not null);
create table if not exists folded (log integer not null);
insert into folded select 0 where not exists (select 1 from folded);
"""


class SpoolFile:
    """The SQLite file and its logs, under an exclusive lock that the system releases when the process
    ends.

    `waiting` is the number of records in the outbox. A count of the rows would read all of them.
    `reserve` bytes of the disk are left to records of requests that are admitted."""

    def __init__(self, path: Path, *, reserve: int = RESERVE) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._folder = str(path.parent)
        self._reserve = reserve
        self.waiting = 0
        self._counting = threading.Lock()
        self._folding = threading.RLock()  # one uses the connection at a time
        self._sealed: list[tuple[int, list[Operation]]] = []  # logs to be folded
        self._lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise
        try:
            self._connection = connect(path)
            self._connection.executescript(_SCHEMA)
            last_log = self._fold_left()
        except (sqlite3.Error, OSError) as error:
            os.close(self._lock)
            if isinstance(error, OSError):
                raise sqlite3.DatabaseError(f"its log: {error}") from error
            raise
        self._log: AppendLog[Operation] = AppendLog(path, last_log + 1)
        # What the streams of the process that left the file had delivered; None: it is not known.
        self.delivered = read_delivered(path)
        # Row numbers must not be reused while the file is open. `autoincrement` would ensure that
        # with a table of its own, which is a third of what a request writes.
        [(last,)] = self._connection.execute("select coalesce(max(seq), 0) from outbox")
        # Not an SQL function in Python: SQLite calls one with the connection locked, and it waits for
        # the interpreter, whose holder may wait for the connection. Then the process stands still.
        self._numbers = count(last + 1)
        [(waiting,)] = self._connection.execute("select count(*) from outbox")
        self.waiting = int(waiting)

    @property
    def connection(self) -> sqlite3.Connection:
        """With everything in the tables that was appended so far."""
        self.fold()
        return self._connection

    def has_room(self) -> bool:
        """Whether the disk has room for the records of another request."""
        return has_room(self._folder, self._reserve)

    def shrink(self) -> None:
        """Give back what a long outage of the database took of the disk. Called in the shipper's
        thread."""
        with self._folding:
            shrink(self._connection, self._reserve // 4)

    def append(self, statements: list[Statement]) -> None:
        """All of them or none, as one frame of the log; the tables have them after the next fold.
        Raises OSError."""
        operations = operations_of(statements, self._numbers)
        self._log.append(encode_operations(operations), operations)
        with self._counting:
            self.waiting += sum([each.outbox for each in statements if each.outbox > 0])

    def fold(self) -> None:
        """Apply the log to the tables. Called in the shipper's thread."""
        with self._folding:
            number, operations = self._log.seal()
            if number:
                self._sealed.append((number, operations))
            while self._sealed:
                number, operations = self._sealed[0]
                self._apply(number, operations)
                del self._sealed[0]
                log_path(self.path, number).unlink(missing_ok=True)

    def commit(self, statements: list[Statement]) -> None:
        """All of them or none, in one transaction."""
        with self._folding:
            self.fold()
            execute, waiting = self._connection.cursor().execute, 0
            execute("begin immediate")
            try:
                for sql, values, outbox, _, is_numbered in statements:
                    if is_numbered:
                        values = (next(self._numbers), *values)
                    waiting += outbox * execute(sql, values).rowcount
                execute("commit")
            except BaseException:
                self._roll_back()
                raise
            with self._counting:
                self.waiting += waiting

    def open_requests(self) -> list[OpenedRequest]:
        """The open requests. A record that cannot be read is parked."""
        found = []
        rows = self.connection.execute("select request_id, body from opened order by request_id")
        for request_id, body in rows.fetchall():
            try:
                found.append(opened_decoder.decode(body))
            except ValueError as error:
                self.commit(park_opened(request_id, f"cannot be read: {error}"))
        return found

    def parked(self) -> int:
        return count_parked(self.connection)

    def is_empty(self) -> bool:
        try:
            self.fold()
        except sqlite3.Error:  # the log holds something
            return False
        row = self._connection.execute(
            "select exists (select 1 from opened) or exists (select 1 from outbox)"
            " or exists (select 1 from parked)"
        ).fetchone()
        return not row[0]

    def close(self, *, remove: bool = False) -> None:
        """What cannot be folded now stays in the log."""
        with contextlib.suppress(sqlite3.Error):
            self.fold()
        self._log.close()
        self._connection.close()
        if remove:
            for suffix in ("", "-wal", "-shm", ".lock"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
            delivered_path(self.path).unlink(missing_ok=True)
        os.close(self._lock)

    def _fold_left(self) -> int:
        """Apply what a killed process left in its logs; returns the number of the last log."""
        [(done,)] = self._connection.execute("select log from folded")
        last = int(done)
        for number, path in logs_of(self.path):
            if number <= done:
                path.unlink()
                continue
            frames, unread = read_log(path)
            try:
                operations = decode_operations(frames)
            except ValueError as error:
                raise sqlite3.DatabaseError(f"{path.name} cannot be read: {error}") from None
            self._apply(number, operations)
            last = number
            if unread:
                kept = keep_damaged(path)
                log.error(
                    "%d bytes at the end of a log cannot be read; it is kept: %s", unread, kept
                )
            else:
                path.unlink()
        return last

    def _apply(self, number: int, operations: list[Operation]) -> None:
        try:
            self._apply_by(apply_together, number, operations)
        except (
            REFUSALS
        ) as error:  # the same at every attempt, and nothing behind it would be shipped
            log.error("log %d of %s: %s; what is refused is parked", number, self.path.name, error)
            self._apply_by(apply_singly, number, operations)

    def _apply_by(
        self,
        apply: Callable[[Execute, list[Operation]], int],
        number: int,
        operations: list[Operation],
    ) -> None:
        execute = self._connection.cursor().execute
        execute("begin immediate")
        try:
            gone = apply(execute, operations)
            execute("update folded set log = ?", (number,))
            execute("commit")
        except BaseException:
            self._roll_back()
            raise
        with self._counting:
            self.waiting -= gone

    def _roll_back(self) -> None:
        if (
            self._connection.in_transaction
        ):  # SQLite may have done it itself: on a full disk it does
            self._connection.execute("rollback")


def connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=5, isolation_level=None, check_same_thread=False)
    connection.execute("pragma journal_mode=wal")
    connection.execute("pragma synchronous=normal")
    connection.execute("pragma secure_delete=on")  # records hold the names of end users
    connection.execute("pragma wal_autocheckpoint=0")  # the shipper does it, off the event loop
    return connection


def count_parked(connection: sqlite3.Connection) -> int:
    return int(connection.execute("select count(*) from parked").fetchone()[0])


def read_outbox(connection: sqlite3.Connection, limit: int, *, after: int = 0) -> list[OutboxRow]:
    return connection.execute(
        "select seq, topic, body from outbox where seq > ? order by seq limit ?", (after, limit)
    ).fetchall()


class Spool:
    """The event loop's side: collects the statements of one loop turn and commits them together."""

    def __init__(self, file: SpoolFile) -> None:
        self.file = file
        self.arrived = threading.Event()  # wakes the shipper
        self._loop: asyncio.AbstractEventLoop | None = None
        self._batch: list[Statement] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._retry: list[Statement] = []  # statements that the disk refused, to be retried
        self._had_room = True
        self._retry_waits = False  # one timer, however many commits fail
        self._on_durable: list[Callable[[], None]] = []  # called once everything queued is durable
        self._delivered = DeliveredCounts(file.path)

    def begin_stream(self, request_id: str) -> StreamCount | None:
        """Where a stream notes what it has delivered, for the case that this process is killed. None:
        nowhere."""
        return self._delivered.begin(request_id)

    async def open(self, record: OpenedRequest) -> None:
        """Returns when the record is durable; raises Unavailable if the disk refuses it."""
        has_room = self.file.has_room()
        if has_room != self._had_room:
            self._had_room = has_room
            if not has_room:
                log.error("the disk of %s is full: requests are refused", self.file.path)
        if not has_room:
            raise no_room()
        await self._add([insert_opened(record)])

    async def reopen(self, record: OpenedRequest) -> None:
        """As `open`, for an open request that moves to another engine or model."""
        await self._add([update_opened(record)])

    async def close(
        self,
        event: UsageEvent,
        on_durable: Callable[[], None] | None = None,
        extra_statements: Sequence[Statement] = (),
    ) -> None:
        """Never raises Unavailable: what the disk refuses goes into a later commit.

        `on_durable` is called once the record is durable; `extra_statements` goes into the same
        commit."""
        if on_durable is not None:
            self._on_durable.append(on_durable)
        with contextlib.suppress(Unavailable):
            await self._add([*move_to_outbox(event), *extra_statements])

    def close_soon(self, event: UsageEvent, on_durable: Callable[[], None] | None = None) -> None:
        if on_durable is not None:
            self._on_durable.append(on_durable)
        self._queue(move_to_outbox(event))

    def note_receipt(
        self, count: EngineCount, on_durable: Callable[[], None] | None = None
    ) -> None:
        if on_durable is not None:
            self._on_durable.append(on_durable)
        self._queue([insert_receipt(count)])

    def note(self, events: Sequence[ModerationEvent]) -> None:
        """Queue moderation events, as one row."""
        self._queue([insert_moderation(events)])

    def forget_shipped(self, last: int) -> None:
        """Delete shipped rows. Called in the shipper's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._call_in_loop(lambda: self._queue([delete_shipped(last)]))

    def park(self, seq: int, reason: str) -> None:
        """Move a row to `parked`. Called in the shipper's thread."""
        self._call_in_loop(lambda: self._queue(move_to_parked(seq, reason)))

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def flush(self) -> None:
        """Commit everything that is queued."""
        batch, self._batch = self._retry + self._batch, []
        waiters, self._waiters = self._waiters, []
        if not batch:
            return
        try:
            self.file.append(batch)
        except OSError as error:
            self._commit_failed(batch, waiters, error)
            return
        self._retry = []
        on_durable, self._on_durable = self._on_durable, []
        for call in on_durable:
            call()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        if not self.arrived.is_set():  # the shipper clears it, then reads what was appended before
            self.arrived.set()

    def _commit_failed(
        self, batch: list[Statement], waiters: list[asyncio.Future[None]], error: OSError
    ) -> None:
        log.error("the spool %s cannot be written: %s", self.file.path, error)
        # The callers of `open` get an error; every other statement must not be lost.
        self._retry = [each for each in batch if not each.is_opening]
        if self._retry and self._loop is not None and not self._retry_waits:
            self._retry_waits = True
            self._loop.call_later(_RETRY_S, self._flush_again)
        failure = no_room()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(failure)

    def _flush_again(self) -> None:
        self._retry_waits = False
        self.flush()

    async def _add(self, statements: list[Statement]) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._queue(statements)
        await waiter

    def _queue(self, statements: list[Statement]) -> None:
        if not self._batch:
            loop = self._loop or asyncio.get_running_loop()
            loop.call_soon(self.flush)
        self._batch += statements

    def _call_in_loop(self, call: Callable[[], None]) -> None:
        if self._loop is None:
            raise RuntimeError("the spool is not bound to an event loop")
        self._loop.call_soon_threadsafe(call)
