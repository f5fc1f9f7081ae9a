"""Serves /metrics, /healthz and /readyz of a Celery worker: a process next to the prefork pool.

The pool's processes write their metrics to PROMETHEUS_MULTIPROC_DIR. A thread in the pool's parent
could hold a lock while it forks, so this process reads the files instead. It ends when its stdin
closes, that is with its worker, and removes the directory.
"""

import contextlib
import json
import os
import shutil
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from sqlalchemy import text

from billing.archive.opening import open_database
from billing.reports import measures
from core import logs, metrics
from core.celery_queue import drop_ping_queue, make_app, ping
from core.clock import Clock, SystemClock
from core.database import Database
from core.settings import load_settings
from core.worker_liveness import SILENT_S, Liveness, Pinger, Times

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


def page(
    database: Database, clock: Clock, directory: str, events_days: int, liveness: Liveness
) -> bytes:
    """The metrics of all processes that share the directory, and those of the database."""
    measures.refresh(database, clock, events_days)
    silence = metrics.worker_silence_seconds
    silence.labels("tasks").set(0.0 if liveness.is_busy else liveness.task_age_s)
    if liveness.sent_age_s is not None:
        silence.labels("schedule").set(liveness.sent_age_s)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, directory)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


def readiness(database: Database, liveness: Liveness) -> dict[str, dict[str, Any]]:
    """The parts of /readyz."""
    tasks_ready = liveness.is_busy or liveness.task_age_s <= SILENT_S
    parts: dict[str, dict[str, Any]] = {
        "broker": {"ready": not liveness.broker_error},
        "tasks": {"ready": tasks_ready, "silent_s": round(liveness.task_age_s, 1)},
    }
    if liveness.broker_error:
        parts["broker"]["error"] = liveness.broker_error
    if liveness.sent_age_s is not None:
        parts["schedule"] = {
            "ready": liveness.sent_age_s <= SILENT_S,
            "silent_s": round(liveness.sent_age_s, 1),
        }
    try:
        with database.read() as session:
            session.execute(text("select 1"))
        parts["database"] = {"ready": True}
    except Exception as error:
        parts["database"] = {"ready": False, "error": type(error).__name__}
    return parts


def main() -> None:
    host, port, prefix, queue = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    directory = os.environ[DIRECTORY]
    settings = load_settings()
    logs.configure(settings.log_level, settings.log_format)
    database = open_database(settings)
    clock = SystemClock()
    app = make_app(settings.broker_url or "", prefix=prefix)
    pinger = Pinger(Times(directory), lambda: ping(app, queue), has_schedule=bool(sys.argv[5]))

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            status, body = 200, b"ok\n"
            if path == "/metrics":
                body = page(database, clock, directory, settings.events_days, pinger.state())
            elif path == "/readyz":
                parts = readiness(database, pinger.state())
                ready = all(each["ready"] for each in parts.values())
                verdict = {"status": "ready" if ready else "not ready", "parts": parts}
                status, body = 200 if ready else 503, json.dumps(verdict).encode() + b"\n"
            elif path == "/healthz":
                if deaf := pinger.state().deaf:
                    status, body = 503, f"{deaf}\n".encode()
            else:
                status, body = 404, b"not found: use /metrics, /healthz or /readyz\n"
            self.send_response(status)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing: scrapes arrive every few seconds."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        _answer(f"error {error}")
        return
    _answer(f"ready {server.server_port}")
    Thread(target=server.serve_forever, daemon=True).start()
    pinger.start()
    sys.stdin.read()
    pinger.stop()
    with contextlib.suppress(Exception):  # the broker may be gone
        drop_ping_queue(app, queue)
    shutil.rmtree(directory, ignore_errors=True)


def _answer(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
