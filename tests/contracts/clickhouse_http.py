"""ClickHouse's HTTP interface, answered by its engine in this process."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest


class _OneQueryASession(BaseHTTPRequestHandler):
    """Refuses the second of two queries of a session, as a server does."""

    busy: ClassVar[set[str]] = set()
    engine: ClassVar[threading.Lock] = threading.Lock()

    def do_POST(self) -> None:
        import chdb

        asked = parse_qs(urlsplit(self.path).query)
        body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        query = asked.get("query", [""])[0] + body
        session = asked.get("session_id", [""])[0]
        if session and session in self.busy:
            self._answer(500, b"Code: 373. DB::Exception: Session is locked. (SESSION_IS_LOCKED)")
            return
        self.busy.add(session)
        time.sleep(0.2)
        text, _, form = query.rstrip("; \n").partition("FORMAT ")
        with self.engine:
            found = chdb.query(text, form.strip() or "TabSeparated").bytes()
        self.busy.discard(session)
        self._answer(200, found)

    do_GET = do_POST

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status == 500:
            self.send_header("X-ClickHouse-Exception-Code", "373")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def clickhouse_server() -> Iterator[int]:
    """Its port."""
    pytest.importorskip("chdb")
    pytest.importorskip("clickhouse_connect")
    serving = ThreadingHTTPServer(("127.0.0.1", 0), _OneQueryASession)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    try:
        yield serving.server_port
    finally:
        serving.shutdown()
        thread.join()
        serving.server_close()
