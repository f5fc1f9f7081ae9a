"""Ships a batch of the outbox to the usage sink, in this process or, under load, in a child process.

Decoding, checking and inserting cost a fifth of what the requests themselves cost, and in the
gateway's process they hold the GIL that requests need. `ProcessShipper` is a child process that reads the
same spool file and has no state of its own: if it is killed, its batch is shipped again, and rows
that were already inserted are recognised by their request ids.
"""

import contextlib
import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from core import logs
from core.clock import SystemClock
from core.database import Database
from gateway.edge import cpu_affinity
from gateway.metering.parked_records import brief, is_permanent
from gateway.metering.spool import connect, read_outbox
from gateway.metering.spool_records import OutboxBatch, decode_outbox
from gateway.metering.usage_sink import UsageSink

log = logging.getLogger("tollhouse.shipper")


class ShippedBatch(Struct, frozen=True):
    """The outbox rows that were read, from `first` to `last` (0 if there were none), and the CPU time
    that it took. `refused` is the reason if the rows can never be stored."""

    first: int
    last: int
    rows: int
    cpu_s: float
    refused: str = ""


class BatchShipper(Protocol):
    def ship(self, after: int, limit: int) -> ShippedBatch:
        """Raises on temporary failures: the database is down, or the helper process was killed."""


class InlineShipper:
    """Ships in the caller's thread."""

    def __init__(self, reader: sqlite3.Connection, sink: UsageSink) -> None:
        self._reader = reader
        self._sink = sink

    def ship(self, after: int, limit: int) -> ShippedBatch:
        began = time.thread_time()
        rows, refused, shipped = read_outbox(self._reader, limit, after=after), "", 0
        if not rows:
            return ShippedBatch(0, 0, 0, 0.0)
        batch: OutboxBatch | None = None
        try:
            batch = decode_outbox(rows)
            shipped = (
                len(batch.usage) + len(batch.moderation) + len(batch.lines) + len(batch.receipts)
            )
            self._sink.record(batch)
        except Exception as error:
            if not is_permanent(error):
                raise
            refused = brief(error)
            if len(rows) == 1 and batch is not None and batch.usage:
                refused = self._park(batch, refused)
        spent = time.thread_time() - began
        return ShippedBatch(rows[0][0], rows[-1][0], shipped, spent, refused)

    def _park(self, batch: OutboxBatch, reason: str) -> str:
        """Park the event in the database, where every operator sees it; "" if that succeeds."""
        try:
            self._sink.park(batch, reason)
        except Exception as error:
            if not is_permanent(error):
                raise
            return reason
        log.error(
            "the usage event %s was refused and is parked in the database: %s",
            batch.usage[0].request_id,
            reason,
        )
        return ""


def refused_rows(shipper: BatchShipper, batch: ShippedBatch) -> Iterator[tuple[int, str]]:
    """Ship the rows of a refused batch singly; yields the number and the reason of each row that
    can never be stored."""
    log.error("a batch of usage was refused; shipping its rows singly: %s", batch.refused)
    for seq in range(batch.first, batch.last + 1):
        single = shipper.ship(seq - 1, 1)
        if single.last == seq and single.refused:
            log.error("a record was refused permanently and is parked: %s", single.refused)
            yield seq, single.refused


class ProcessShipperFailed(Exception):
    """The helper process reported an error or exited. The next call starts another."""


class ProcessShipper:
    """Ships in a child process, which starts at the first call and ends when its stdin closes."""

    def __init__(
        self,
        spool: Path,
        database_url: str,
        log_level: str,
        log_format: str,
        *,
        stream_url: str = "",
    ) -> None:
        config = {"spool": str(spool), "database": database_url, "level": log_level}
        config |= {"format": log_format, "stream": stream_url}
        self._config = json.dumps(config).encode() + b"\n"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def ship(self, after: int, limit: int) -> ShippedBatch:
        line = b""
        # An error or an incomplete line means that the process has ended.
        with contextlib.suppress(OSError):
            line = self._exchange_line(json.dumps([after, limit]).encode() + b"\n")
        if not line.endswith(b"\n"):
            self.close()
            raise ProcessShipperFailed(
                "the shipping process exited; the next attempt starts another"
            )
        answer = json.loads(line)
        if "failed" in answer:
            raise ProcessShipperFailed(answer["failed"])
        return ShippedBatch(**answer)

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

    def _exchange_line(self, line: bytes) -> bytes:
        if self._process is None:
            self._process = self._start()
            line = self._config + line
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(line)
        stdin.flush()
        return stdout.readline()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "gateway.metering.batch_shippers"]
        # Otherwise its metrics would appear as those of another gateway process.
        environment = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
        pipe = subprocess.PIPE
        with cpu_affinity.all_cores_for_children():
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)


def serve(
    read: Callable[[], bytes], write: Callable[[bytes], object], shipper: BatchShipper
) -> None:
    """Answer each line of JSON with one line, until the input ends."""
    while line := read():
        after, limit = json.loads(line)
        try:
            shipped_batch = shipper.ship(after, limit)
            answer = {name: getattr(shipped_batch, name) for name in ShippedBatch.__struct_fields__}
        except Exception as error:
            answer = {"failed": brief(error)}
        write(json.dumps(answer).encode() + b"\n")


def main() -> None:
    from gateway.metering.streams.opening import make_sink, open_stream

    # Signals go to the whole process group, but this process must outlive its gateway's last batch.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    config = json.loads(sys.stdin.buffer.readline())
    logs.configure(config["level"], config["format"])
    stream = open_stream(config["stream"]) if config.get("stream") else None
    sink = make_sink(Database(config["database"]), SystemClock(), stream)

    def _write(line: bytes) -> None:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()

    serve(sys.stdin.buffer.readline, _write, InlineShipper(connect(Path(config["spool"])), sink))


if __name__ == "__main__":
    main()
