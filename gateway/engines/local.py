"""Supervises an engine process on this machine: starts it, and restarts it when it exits."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gateway.edge import cpu_affinity
from gateway.engines.local_pages import socket_of

log = logging.getLogger("tollhouse.engine")
STOP_S = 10.0
SILENCE_S = 30.0  # without a line of the engine, which says each second that it lives
_LOOK_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_STEADY_S = 60.0  # a process that ran this long resets the restart back-off


@dataclass(frozen=True, slots=True)
class EngineOptions:
    model: str
    address: str  # ipc://…, stable across restarts
    receipts: Path
    dtype: str = "auto"
    quantization: str = "auto"
    kv_dtype: str = "auto"
    kv_window: int | None = None
    kv_sinks: int = 4
    kv_heavy: int = 0
    batch_invariant: bool = False
    tp: int = 1
    draft_model: Path | None = None
    draft_heads: str = "auto"
    kv_memory_mb: int = 0  # MiB; 0: the engine decides
    extra: tuple[str, ...] = ()

    def command(self) -> list[str]:
        arguments = [sys.executable, "-m", "engine.worker.server", "--exit-with-parent"]
        arguments.append("--report-alive")
        arguments += ["--model", self.model, "--listen", self.address, "--dtype", self.dtype]
        arguments += ["--quantization", self.quantization, "--receipts", str(self.receipts)]
        arguments += ["--kv-dtype", self.kv_dtype]
        arguments += ["--metrics-socket", socket_of(self.address)]
        if self.kv_window is not None:
            arguments += ["--kv-window", str(self.kv_window), "--kv-sinks", str(self.kv_sinks)]
        if self.kv_heavy:
            arguments += ["--kv-heavy", str(self.kv_heavy)]
        if self.batch_invariant:
            arguments.append("--batch-invariant")
        if self.tp > 1:
            arguments += ["--tp", str(self.tp)]
        if self.draft_model is not None:
            arguments += ["--draft-model", str(self.draft_model)]
        if self.draft_heads != "auto":
            arguments += ["--draft-heads", self.draft_heads]
        if self.kv_memory_mb:
            arguments += ["--kv-memory-bytes", str(self.kv_memory_mb << 20)]
        return [*arguments, *self.extra]


class EngineProcess:
    """One supervised engine. A thread waits for the process and restarts it when it exits."""

    def __init__(self, options: EngineOptions, *, on_give_up: Callable[[str], None] | None = None):
        self.options = options
        self.starts = 0
        self.problem = ""  # the last error line of a process that did not become ready
        self.silence_s = SILENCE_S
        self._heard_at = 0.0
        self._on_give_up = on_give_up
        self._process: subprocess.Popen[str] | None = None
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tollhouse-engine", daemon=True)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        self.options.receipts.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """False if it is not ready in time, or if its first start failed (see `problem`)."""
        deadline = time.monotonic() + timeout_s
        while not self._ready.wait(0.1):
            if self.problem or time.monotonic() > deadline:
                return False
        return True

    def stop(self) -> None:
        """Ask the engine to drain and exit; kill it after STOP_S seconds."""
        self._stopping.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def _watch(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            began = time.monotonic()
            self._run_once()
            if self._stopping.is_set():
                return
            pause = _FIRST_PAUSE_S if time.monotonic() - began > _STEADY_S else pause * 2
            pause = min(pause, _LONGEST_PAUSE_S)
            log.error("the engine exited; restarting it in %.1f s", pause)
            self._stopping.wait(pause)

    def _run_once(self) -> None:
        self.starts += 1
        environment = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
        with cpu_affinity.all_cores_for_children():
            process = subprocess.Popen(
                self.options.command(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=Path(__file__).parents[2],
            )
        self._process = process
        errors = threading.Thread(target=self._echo_errors, args=(process,), daemon=True)
        errors.start()
        assert process.stdout is not None
        over = threading.Event()
        for line in process.stdout:
            self._heard_at = time.monotonic()
            if _is_ready(line):
                self.problem = ""
                self._ready.set()
                looks = threading.Thread(target=self._end_silent, args=(process, over), daemon=True)
                looks.start()
        over.set()
        code = process.wait()
        errors.join(2)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        if not self._ready.is_set() and not self._stopping.is_set():
            self.problem = self.problem or f"it exited with code {code}"
        self._ready.clear()

    def _end_silent(self, process: "subprocess.Popen[str]", over: threading.Event) -> None:
        """Kill a process that is ready and falls silent, such as a stopped one. Its own watchdog ends
        it before, if it can."""
        looked_at = time.monotonic()
        while not over.wait(_LOOK_S):
            now = time.monotonic()
            if now - looked_at > 2 * _LOOK_S:  # this process itself was blocked
                self._heard_at = now
            looked_at = now
            if now - self._heard_at > self.silence_s:
                log.error("the engine was silent for %.0f s: it is killed", self.silence_s)
                process.kill()
                return

    def _echo_errors(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(f"engine: {line}")
            if not self._ready.is_set() and line.startswith("tollhouse engine: "):
                self.problem = line.removeprefix("tollhouse engine: ").strip()


def _is_ready(line: str) -> bool:
    try:
        message = json.loads(line)
    except ValueError:
        return False
    return isinstance(message, dict) and message.get("event") == "ready"
