"""Starts the other ranks of a group as processes of this host, and watches them: if one ends, or does not
come, the group is over, and one line says which and why."""

import logging
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine.backends.compiled.group import Group
from engine.config import EngineConfig
from engine.errors import EngineError, RankError
from engine.parallel import rendezvous
from engine.parallel.follower import Answer
from engine.parallel.limits import check_limits
from engine.parallel.rank import LOAD_S
from engine.parallel.ring import RingWriter
from engine.parallel.runner import ParallelRunner
from engine.runners.cpu.runner import load_rank

log = logging.getLogger("tollhouse.engine")

CONNECT_S = 120.0  # that a rank's process takes to start
_STOP_S = 5.0  # that it takes to end
_SAID_S = 1.0  # in which a rank that fails says why


def start_ranks(config: EngineConfig) -> ParallelRunner:
    """Loads the first rank's part here, and the others' in processes of their own.

    Raises ConfigError or CheckpointError, whose message says what to change, or RankError.
    """
    check_limits(config)
    ranks = _Ranks(config)
    try:
        ranks.start()
        local = load_rank(config, ranks.group)
        ranks.group.exchange("ready")
    except BaseException as error:
        ranks.group.end(f"rank 0: {error}")
        ranks.close()
        raise
    ranks.group.patience_s = config.stall_s
    ring = RingWriter(ranks.ring, config.tp, ranks.group.over_address, config.stall_s)
    return ParallelRunner(local, ranks.group, ring, ranks.answers, ranks.close)


class _Ranks:
    """The processes of the ranks 1 and up."""

    def __init__(self, config: EngineConfig) -> None:
        self._size = config.tp
        self._folder = Path(tempfile.mkdtemp(prefix="tollhouse-ranks-"))
        self._meeting = rendezvous.meeting(config, self._folder)
        try:
            memory, self.ring = rendezvous.divided(
                rendezvous.make_memory(self._meeting), self._size
            )
        except EngineError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self.group = Group(memory, 0, self._size, LOAD_S)
        self.answers: list[queue.SimpleQueue[Answer]] = [
            queue.SimpleQueue() for _ in range(1, self._size)
        ]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._connections: dict[int, socket.socket] = {}
        self._opened: set[int] = set()  # ranks that have the memory
        self._failures: dict[int, str] = {}
        self._closing = False
        self._changed = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX)

    def start(self) -> None:
        """Returns when all have connected. Raises RankError for one that does not."""
        self._listener.bind(self._meeting.socket)
        self._listener.listen(self._size)
        file = rendezvous.write(self._meeting, self._folder)
        self._thread("accept", self._accept)
        for rank in range(1, self._size):
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "engine.parallel.rank", str(file), "--rank", str(rank)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=Path(__file__).parents[2],
            )
            self._thread(f"rank-{rank}", self._watch, rank)
        until = time.monotonic() + CONNECT_S
        with self._changed:
            while len(self._opened) < self._size - 1:
                if self.group.over:
                    raise RankError(self.group.reason)
                if not self._changed.wait(0.1) and time.monotonic() > until:
                    late = min(set(self._processes) - self._opened)
                    raise RankError(f"rank {late} did not connect within {CONNECT_S:g} s")
        # None leaves it behind from now on, however it ends.
        Path(self._meeting.memory).unlink()

    def close(self) -> None:
        self._closing = True
        self._listener.close()
        for process in self._processes.values():
            try:
                if self.group.over:
                    process.send_signal(signal.SIGKILL)  # which also ends one that was stopped
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections.values():
            connection.close()
        Path(self._meeting.memory).unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _thread(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, name=name, daemon=True).start()

    def _watch(self, rank: int) -> None:
        code = self._processes[rank].wait()
        if self._closing:
            return
        time.sleep(0.0 if rank in self._failures else _SAID_S / 10)
        how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        self._end(
            self._failures.get(rank) or f"rank {rank} (process {self._processes[rank].pid}) {how}"
        )

    def _end(self, why: str) -> None:
        if not self._closing and not self.group.over:
            log.error("the group of %d ranks ends: %s", self._size, why)
        self.group.end(why)
        with self._changed:
            self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._thread("rank-answers", self._hear, connection)

    def _hear(self, connection: socket.socket) -> None:
        records = rendezvous.records(connection)
        hello = next(records, None)
        if hello is None:
            return
        rank, refused = int(hello.get("rank", -1)), ""
        with self._changed:
            if rank not in range(1, self._size):
                refused = f"there is no rank {rank} in a group of {self._size}"
            elif hello.get("digest") != self._meeting.digest:
                refused = f"rank {rank} has other settings than rank 0: start all with the same"
            elif rank in self._connections:
                refused = f"rank {rank} has connected before: start each rank once"
            else:
                self._connections[rank] = connection
                self._changed.notify_all()
        if refused:
            log.warning("a rank was refused: %s", refused)
            rendezvous.send(connection, {"refused": refused})
            connection.close()
            return
        rendezvous.send(connection, {"welcome": rank})
        for record in records:
            if "answer" in record:
                number, *rest = record["answer"]
                self.answers[rank - 1].put((number, *rest))
            elif "opened" in record:
                with self._changed:
                    self._opened.add(rank)
                    self._changed.notify_all()
            elif "failed" in record:
                failed = str(record["failed"])
                named = failed if failed.startswith("rank ") else f"rank {rank}: {failed}"
                self._failures[rank] = named
                if "ended the group" not in failed:
                    self._end(named)
