"""An append-only log next to the spool's tables: one frame (length, CRC-32, payload) for each commit.

A frame is a single write, so a killed process leaves all of it or a torn end, which the CRC tells.
Whatever reads the log stops at the first frame that is not whole. A log is written by one process,
which folds it into the tables and removes it; the number in its name says which were folded.
"""

import errno
import os
import sqlite3
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from gateway.metering.spool_records import OPERATION
from gateway.metering.spool_statements import (
    DELETIONS,
    INSERT_OPENED,
    INSERT_OUTBOX,
    LOGGED,
    REPLACE_OPENED,
    Operation,
    folded,
)

T = TypeVar("T")
_HEAD = struct.Struct("<II")  # length of the payload, and its CRC-32
_FLAGS = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND


def log_path(path: Path, number: int) -> Path:
    """`path` is the SQLite file's."""
    return path.with_name(f"{path.name}.log-{number:08d}")


def logs_of(path: Path) -> list[tuple[int, Path]]:
    """The logs next to an SQLite file by number, oldest first."""
    found = path.parent.glob(f"{path.name}.log-*")
    return sorted((int(each.name.rpartition("-")[2]), each) for each in found)


def read_log(path: Path) -> tuple[list[bytes], int]:
    """The payloads of the whole frames, and how many bytes behind them cannot be read."""
    data, at, found = path.read_bytes(), 0, list[bytes]()
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        payload = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(payload) != length or zlib.crc32(payload) != checksum:
            break
        found.append(payload)
        at += _HEAD.size + length
    return found, len(data) - at


def keep_damaged(path: Path) -> Path:
    """Rename a log whose end cannot be read, so that nobody reads it again and nothing removes it."""
    kept = path.with_name(path.name.replace(".log-", ".damaged-"))
    path.rename(kept)
    return kept


class AppendLog(Generic[T]):
    """The log that is being written, and what its frames hold. One thread appends while another
    seals."""

    def __init__(self, path: Path, number: int) -> None:
        """`path` is the SQLite file's; `number` is that of the next log."""
        self._path = path
        self._number = number
        self._file: int | None = None
        self._size = 0  # bytes of whole frames
        self._torn = False  # the end of the file is not whole
        self._held: list[T] = []
        self._lock = threading.Lock()

    def append(self, payload: bytes, held: Sequence[T]) -> None:
        """One frame, which holds `held`. Raises OSError, and then nothing of it is read again."""
        frame = _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
        with self._lock:
            if self._file is None:
                self._file = os.open(log_path(self._path, self._number), _FLAGS, 0o600)
                self._size = 0
            if self._torn:  # a frame behind it would never be read
                self._cut(self._file)
            self._torn = True
            written = 0
            try:
                written = os.write(self._file, frame)
                if written != len(frame):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                self._cut(self._file)
                raise
            self._torn = False
            self._size += written
            self._held += held

    def seal(self) -> tuple[int, list[T]]:
        """Ends the log: its number and what it holds; (0, []) without any. The next frame begins
        another."""
        with self._lock:
            if self._file is None or not self._size:
                return 0, []
            os.close(self._file)
            held, self._held, self._file, self._torn = self._held, [], None, False
            self._number += 1
            return self._number - 1, held

    def close(self) -> None:
        with self._lock:
            if self._file is None:
                return
            os.close(self._file)
            self._file = None
            if not self._size:
                log_path(self._path, self._number).unlink(missing_ok=True)

    def _cut(self, file: int) -> None:
        os.ftruncate(file, self._size)
        self._torn = False


# Applies the operations of a spool's log to its tables, within a transaction: together, or one by one
# where the tables refuse some, which are parked.


# An operational error (a full disk, a lock) may pass; these are the same at every attempt.
REFUSALS = (
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    OverflowError,
)
Execute = Callable[..., sqlite3.Cursor]
_PARK = "insert into parked (topic, body, reason) values (?, ?, ?)"


def apply_together(execute: Execute, operations: list[Operation]) -> int:
    """Returns how many rows the outbox has less than was appended."""
    gone = 0
    for sql, values in folded(operations):
        rows = execute(sql, values).rowcount
        gone += rows if sql in DELETIONS else 0
    return gone


def apply_singly(execute: Execute, operations: list[Operation]) -> int:
    """As `apply_together`, and parks what is refused."""
    gone = 0
    for number, values in operations:
        sql = LOGGED[number]
        execute("savepoint one")
        try:
            rows = execute(REPLACE_OPENED if sql == INSERT_OPENED else sql, values).rowcount
        except REFUSALS as error:
            execute("rollback to one")
            execute(_PARK, (*_kept(number, values), f"the spool refused it: {error}"))
            gone += sql == INSERT_OUTBOX
        else:
            gone += rows if sql in DELETIONS else 0
        execute("release one")
    return gone


def _kept(number: int, values: tuple[Any, ...]) -> tuple[str, bytes]:
    """Topic and body of the parked row."""
    if LOGGED[number] == INSERT_OUTBOX and len(values) == 3 and isinstance(values[2], bytes):
        return str(values[1]), values[2]
    return OPERATION, msgspec.msgpack.encode((number, values))
