"""Supervises several gateway processes on one socket: starts, restarts and stops them."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import FrameType

from prometheus_client.multiprocess import mark_process_dead

from core.settings import PREFIX, Settings
from gateway.edge.listening import DRAIN_QUEUE_S, stop_connecting

log = logging.getLogger("tollhouse.workers")
_PASSED_NAMES = ("upstreams", "host", "port", "workers", "data_dir", "model", "model_name")
_LONGEST_PAUSE_S = 10.0


def serve_with_workers(
    listener: socket.socket,
    settings: Settings,
    ready: Callable[[], None],
    metrics_listener: socket.socket | None = None,
) -> int:
    """Run until SIGTERM or SIGINT. `ready` is called once, in a thread, after the workers start."""
    pool = _WorkerPool([listener, *([metrics_listener] if metrics_listener else [])], settings)
    signal.signal(signal.SIGTERM, pool.on_signal)
    signal.signal(signal.SIGINT, pool.on_signal)
    pool.start()
    problems: list[BaseException] = []
    announcer = threading.Thread(target=_announce, args=(ready, pool, problems), daemon=True)
    announcer.start()
    pool.watch()
    if problems:
        raise problems[0]
    return 0


def _announce(
    ready: Callable[[], None], pool: "_WorkerPool", problems: list[BaseException]
) -> None:
    try:
        ready()
    except BaseException as error:
        problems.append(error)
        pool.stopping.set()


class _WorkerPool:
    def __init__(self, listeners: list[socket.socket], settings: Settings) -> None:
        self.stopping = threading.Event()
        self._listeners = listeners
        self._settings = settings
        self._metrics_dir = tempfile.mkdtemp(prefix="tollhouse-metrics-")
        self._workers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self._workers = [self._spawn(index) for index in range(self._settings.workers)]

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stopping.set()

    def watch(self) -> None:
        """Restart workers that end, until `stopping` is set; then let the workers finish and stop."""
        pause = 0.1
        while not self.stopping.wait(0.2):
            for index, worker in enumerate(self._workers):
                code = worker.poll()
                if code is None:
                    continue
                log.error("gateway worker %d exited with %s; restarting it", worker.pid, code)
                # Otherwise its last gauges, such as the age of its spool, are shown for good.
                mark_process_dead(worker.pid, self._metrics_dir)  # type: ignore[no-untyped-call]
                self.stopping.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_S)
                if not self.stopping.is_set():
                    self._workers[index] = self._spawn(index)
        self._stop()

    def _wait(self, seconds: float) -> None:
        """Until the time has passed or all workers have ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(each.poll() is None for each in self._workers):
            time.sleep(0.05)

    def _spawn(self, index: int) -> "subprocess.Popen[bytes]":
        environment = dict(os.environ)
        for name in _PASSED_NAMES:
            environment[PREFIX + name.upper()] = str(getattr(self._settings, name))
        environment["PROMETHEUS_MULTIPROC_DIR"] = self._metrics_dir
        descriptors = [each.fileno() for each in self._listeners]
        command = [sys.executable, "-m", "gateway.cli.serve.worker_process"]
        command += [",".join(map(str, descriptors)), str(index)]
        return subprocess.Popen(command, env=environment, pass_fds=descriptors)

    def _stop(self) -> None:
        for worker in self._workers:
            worker.send_signal(signal.SIGTERM)
        self._wait(max(0.0, self._settings.drain_delay_s - DRAIN_QUEUE_S))
        stop_connecting(self._listeners[0])
        self._wait(min(self._settings.drain_delay_s, DRAIN_QUEUE_S))
        # A socket that anybody holds open takes connections that nobody would accept.
        self._listeners[0].close()
        deadline = time.monotonic() + self._settings.drain_timeout_s + 15
        for worker in self._workers:
            try:
                worker.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
        shutil.rmtree(self._metrics_dir, ignore_errors=True)
