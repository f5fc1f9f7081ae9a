"""The worker's /metrics, /healthz and /readyz, served from a thread of its own."""

import contextlib
import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Protocol

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.loop import Engine
from engine.worker.gateways import Gateways

STALLED_S = 60.0  # without a turn of the loop for this long, the worker is unhealthy
MAX_FAILURES = 3  # consecutive failed steps that make the worker unhealthy


class MonitoredServer(Protocol):
    config: EngineConfig
    engine: Engine
    gateways: Gateways
    last_turn: float

    @property
    def draining(self) -> bool: ...

    @property
    def refused_handshakes(self) -> int: ...


class _UnixServer(ThreadingHTTPServer):
    """For a gateway on the same machine."""

    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's own looks up the name of a host
        self.server_name, self.server_port = "localhost", 0


class Monitor:
    """Serves until closed, on `metrics_port` (0 chooses a free one), `metrics_socket`, or both."""

    def __init__(self, server: MonitoredServer) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                status, kind, body = _respond(server, self.path)
                data = body.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Logs nothing: scrapes arrive every few seconds."""

        self.url: str | None = None
        self._servers: list[ThreadingHTTPServer] = []
        config = server.config
        try:
            if config.metrics_port is not None:
                host = _host(config.listen)
                self._servers.append(ThreadingHTTPServer((host, config.metrics_port), Handler))
                shown = "127.0.0.1" if host == "0.0.0.0" else host
                self.url = f"http://{shown}:{self._servers[0].server_port}/metrics"
            if config.metrics_socket is not None:
                _remove(config.metrics_socket)  # an engine that was killed leaves it
                self._servers.append(_UnixServer(config.metrics_socket, Handler))  # type: ignore[arg-type]
        except OSError as error:
            for each in self._servers:
                each.server_close()
            where = f"metrics_socket {config.metrics_socket}"
            if self.url is None and config.metrics_port is not None:
                where = f"metrics_port {config.metrics_port}"
            raise EngineError(
                "cannot_listen", f"cannot listen on {where}: {error}; choose another one"
            ) from error
        self._socket = config.metrics_socket
        self._threads = []
        for each in self._servers:
            each.daemon_threads = True
            self._threads.append(threading.Thread(target=each.serve_forever, daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        for each in self._servers:
            each.shutdown()
            each.server_close()
        for thread in self._threads:
            thread.join(5)
        if self._socket is not None:
            _remove(self._socket)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _host(listen: str) -> str:
    """The interface that gateways connect to; scrapers and probes come from the same machines."""
    if not listen.startswith("tcp://"):
        return "127.0.0.1"
    host = listen.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return "0.0.0.0" if host in ("*", "") or ":" in host else host


def _respond(server: MonitoredServer, path: str) -> tuple[int, str, str]:
    if path == "/metrics":
        text = server.engine.metrics_text(
            {"gateways": len(server.gateways), "refused_handshakes": server.refused_handshakes}
        )
        return 200, "text/plain; version=0.0.4; charset=utf-8", text
    parts = _parts(server)
    if path == "/healthz":
        faults = [parts[name]["error"] for name in ("loop", "device") if not parts[name]["ready"]]
        return (503 if faults else 200), "text/plain", f"{faults[0] if faults else 'ok'}\n"
    if path == "/readyz":
        ready = all(part["ready"] for part in parts.values())
        verdict = {"status": "ready" if ready else "not ready", "parts": parts}
        return 200 if ready else 503, "application/json", json.dumps(verdict) + "\n"
    return 404, "text/plain", "not found: use /metrics, /healthz or /readyz\n"


def _parts(server: MonitoredServer) -> dict[str, dict[str, str | bool | float]]:
    """What a new request needs. A process whose loop or device fails has to be replaced; one that
    drains ends by itself."""
    silent_s, failures = time.monotonic() - server.last_turn, server.engine.failures_in_a_row
    parts: dict[str, dict[str, str | bool | float]] = {
        "loop": {"ready": silent_s <= STALLED_S, "silent_s": round(silent_s, 1)},
        "device": {"ready": failures < MAX_FAILURES},
        "requests": {"ready": not server.draining},
    }
    errors = {
        "loop": f"the engine loop has stalled for {STALLED_S:g} s",
        "device": f"the last {failures} steps failed on the device",
        "requests": "the engine is stopping: running requests end, new ones are refused",
    }
    for name, part in parts.items():
        if not part["ready"]:
            part["error"] = errors[name]
    return parts
