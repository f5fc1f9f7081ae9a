"""The process that stores what a stream holds, in its own process or inside a worker or gateway.

A process of its own: a worker forks, which neither client of a stream survives, and storing usage
would hold the GIL of a gateway. It ends when its stdin closes, after the messages in hand.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading

from core import logs, metrics
from core.clock import Clock, SystemClock
from core.database import Database
from core.settings import Settings
from gateway.edge import cpu_affinity
from gateway.metering.parked_records import brief
from gateway.metering.streams.base import UsageStream, age_s
from gateway.metering.streams.opening import open_stream
from gateway.metering.streams.storing import StreamStore
from gateway.metering.usage_sink import SqlUsageSink

log = logging.getLogger("tollhouse.stream")
_WAIT_S = 1.0
_MEASURE_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0


class StreamConsumer:
    """Starts the process and, when it ends unasked, another. Without a stream it does nothing."""

    def __init__(self, settings: Settings) -> None:
        self._is_used = bool(settings.stream_url)
        self._config = json.dumps(
            {
                "stream": settings.stream_url,
                "database": settings.effective_database_url,
                "level": settings.log_level,
                "format": settings.log_format,
            }
        )
        self._stopping = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, name="tollhouse-stream", daemon=True)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        if self._is_used:
            self._thread.start()

    def stop(self, timeout_s: float = 15.0) -> None:
        self._stopping.set()
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            command = [sys.executable, "-m", "gateway.metering.streams.consumer"]
            with cpu_affinity.all_cores_for_children():
                process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
            self._process = process
            assert process.stdin is not None
            try:
                process.stdin.write(self._config + "\n")
                process.stdin.flush()
            except OSError as error:
                log.warning("the consumer of the stream did not start: %s", error)
            process.wait()
            with contextlib.suppress(OSError):
                process.stdin.close()
            if self._stopping.wait(0):
                return
            log.error("the consumer of the stream ended; another starts in %.1f s", pause)
            self._stopping.wait(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)


def measure(stream: UsageStream, clock: Clock) -> None:
    lag = stream.lag()
    metrics.stream_messages.set(lag.messages)
    metrics.stream_age_seconds.set(age_s(lag.oldest, clock))


def consume(store: StreamStore, stopping: threading.Event) -> None:
    """Store messages until `stopping`. A failure is retried: the stream keeps what is not stored."""
    pause, measured = _FIRST_PAUSE_S, 0.0
    while not stopping.is_set():
        try:
            now = store.clock.now().timestamp()
            if now - measured >= _MEASURE_S:
                measure(store.stream, store.clock)
                measured = now
            store.store_next(_WAIT_S)
            pause = _FIRST_PAUSE_S
        except Exception as error:
            log.warning("cannot store the stream; retrying in %.1f s: %s", pause, brief(error))
            stopping.wait(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)


def main() -> None:
    # Signals go to the whole process group; the worker closes stdin when it stops.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    config = json.loads(sys.stdin.readline())
    logs.configure(config["level"], config["format"])
    stopping = threading.Event()

    def _watch() -> None:
        sys.stdin.read()
        stopping.set()

    threading.Thread(target=_watch, daemon=True).start()
    database, clock = Database(config["database"]), SystemClock()
    stream = open_stream(config["stream"])
    consume(StreamStore(stream, SqlUsageSink(database, clock), database, clock), stopping)
    stream.close()
    database.close()
    sys.stdout.flush()
    os._exit(0)  # the thread that reads stdin may hold its lock


if __name__ == "__main__":
    main()
