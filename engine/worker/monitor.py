"""The worker's /metrics and /healthz, served from a thread beside the loop."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


class Monitor:
    """Serves until closed. Port 0 chooses a free one."""

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

        port = server.config.metrics_port or 0
        host = _host(server.config.listen)
        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise EngineError(
                "cannot_listen",
                f"cannot listen on metrics_port {port}: {error}; choose another port",
            ) from error
        self._server.daemon_threads = True
        shown = "127.0.0.1" if host == "0.0.0.0" else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def _host(listen: str) -> str:
    """The interface that gateways connect to; scrapers and probes come from the same machines."""
    if not listen.startswith("tcp://"):
        return "127.0.0.1"
    host = listen.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return "0.0.0.0" if host in ("*", "") or ":" in host else host


def _respond(server: MonitoredServer, path: str) -> tuple[int, str, str]:
    if path == "/metrics":
        text = server.engine.metrics_text({"gateways": len(server.gateways)})
        return 200, "text/plain; version=0.0.4; charset=utf-8", text
    if path != "/healthz":
        return 404, "text/plain", "not found: use /metrics or /healthz\n"
    if time.monotonic() - server.last_turn > STALLED_S:
        return 503, "text/plain", f"the engine loop has stalled for {STALLED_S:g} s\n"
    if server.engine.failures_in_a_row >= MAX_FAILURES:
        count = server.engine.failures_in_a_row
        return 503, "text/plain", f"the last {count} steps failed on the device\n"
    return 200, "text/plain", "ok\n"
