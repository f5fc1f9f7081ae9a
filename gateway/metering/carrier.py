"""Ships a batch of the outbox to the usage sink, in this process or, under load, in a child process.

Decoding, checking and inserting cost a fifth of what the requests themselves cost, and in the
gateway's process they hold the GIL that requests need. `Helper` is a child process that reads the
same spool file and has no state of its own: if it is killed, its batch is shipped again, and rows
that were already inserted are recognised by their request ids.
"""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec import Struct
from sqlalchemy.exc import DBAPIError, OperationalError

from core import logs
from core.clock import SystemClock
from core.database import Database
from gateway.metering.spool import Outgoing, connect, read_outbox
from gateway.server import cores


class Books(Protocol):
    """The destination of usage events. A call is one transaction and idempotent."""

    def record(self, batch: Outgoing) -> None: ...


class Carried(Struct, frozen=True):
    """The outbox rows that were read, from `first` to `last` (0 if there were none), and the CPU time
    that it took. `refused` is the reason if the database refused them permanently."""

    first: int
    last: int
    rows: int
    cpu_s: float
    refused: str = ""


class Carrier(Protocol):
    def carry(self, after: int, limit: int) -> Carried:
        """Raises on temporary failures: the database is down, or the helper process was killed."""


class Porter:
    """Ships in the caller's thread."""

    def __init__(self, reader: sqlite3.Connection, books: Books) -> None:
        self._reader = reader
        self._books = books

    def carry(self, after: int, limit: int) -> Carried:
        began = time.thread_time()
        batch, refused = read_outbox(self._reader, limit, after=after), ""
        if batch.last:
            try:
                self._books.record(batch)
            except OperationalError:
                raise
            except (DBAPIError, ValueError, LookupError) as error:
                refused = brief(error)
        rows = len(batch.usage) + len(batch.moderation) + len(batch.lines)
        return Carried(batch.first, batch.last, rows, time.thread_time() - began, refused)


class HelperFailed(Exception):
    """The helper process reported an error or exited. The next call starts another."""


class Helper:
    """Ships in a child process, which starts at the first call and ends when its stdin closes."""

    def __init__(self, spool: Path, database_url: str, log_level: str, log_format: str) -> None:
        told = {"spool": str(spool), "database": database_url, "level": log_level}
        self._told = json.dumps({**told, "format": log_format}).encode() + b"\n"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def carry(self, after: int, limit: int) -> Carried:
        line = b""
        # An error or an incomplete line means that the process has ended.
        with contextlib.suppress(OSError):
            line = self._asked(json.dumps([after, limit]).encode() + b"\n")
        if not line.endswith(b"\n"):
            self.close()
            raise HelperFailed("the shipping process exited; the next attempt starts another")
        answer = json.loads(line)
        if "failed" in answer:
            raise HelperFailed(answer["failed"])
        return Carried(**answer)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _asked(self, line: bytes) -> bytes:
        if self._process is None:
            self._process = self._start()
            line = self._told + line
        told, said = self._process.stdin, self._process.stdout
        assert told is not None and said is not None
        told.write(line)
        told.flush()
        return said.readline()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "gateway.metering.carrier"]
        # Otherwise its metrics would appear as those of another gateway process.
        kept = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
        pipe = subprocess.PIPE
        with cores.as_for_children():
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=kept)


def brief(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


def serve(read: Callable[[], bytes], write: Callable[[bytes], object], carrier: Carrier) -> None:
    """Answer each line of JSON with one line, until the input ends."""
    while line := read():
        after, limit = json.loads(line)
        try:
            carried = carrier.carry(after, limit)
            answer = {name: getattr(carried, name) for name in Carried.__struct_fields__}
        except Exception as error:
            answer = {"failed": brief(error)}
        write(json.dumps(answer).encode() + b"\n")


def main() -> None:
    from gateway.metering.books import SqlBooks

    # Signals go to the whole process group, but this process must outlive its gateway's last batch.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    told = json.loads(sys.stdin.buffer.readline())
    logs.configure(told["level"], told["format"])
    books = SqlBooks(Database(told["database"]), SystemClock())

    def _write(line: bytes) -> None:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()

    serve(sys.stdin.buffer.readline, _write, Porter(connect(Path(told["spool"])), books))


if __name__ == "__main__":
    main()
