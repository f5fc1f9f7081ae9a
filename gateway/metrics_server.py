"""Serves /metrics and /healthz of a Celery worker: a process of its own beside the prefork pool.

The pool's processes write their metrics to PROMETHEUS_MULTIPROC_DIR. A thread in the pool's parent
could hold a lock while it forks, so this process reads the files instead. It ends when its stdin
closes, that is with its worker, and removes the directory.
"""

import os
import shutil
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from billing import measures
from billing.archive.opening import open_database
from core import logs
from core.clock import Clock, SystemClock
from core.database import Database
from core.settings import load_settings

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


def page(database: Database, clock: Clock, directory: str, events_days: int) -> bytes:
    """The metrics of all processes that share the directory, and those of the database."""
    measures.refresh(database, clock, events_days)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, directory)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    directory = os.environ[DIRECTORY]
    settings = load_settings()
    logs.configure(settings.log_level, settings.log_format)
    database = open_database(settings)
    clock = SystemClock()

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            status, body = 200, b"ok\n"
            if path == "/metrics":
                body = page(database, clock, directory, settings.events_days)
            elif path != "/healthz":
                status, body = 404, b"not found: use /metrics or /healthz\n"
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
    sys.stdin.read()
    shutil.rmtree(directory, ignore_errors=True)


def _answer(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
