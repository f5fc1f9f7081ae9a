"""An OpenAI-compatible server for tests: says what it is told to, and keeps what it was asked. A body
that OpenAI's schema refuses fails the test that the server was started for."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.gateway.openai_schema import faults


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        # path -> object; a list is a stream of objects; bytes are sent as they are, a list of them
        # as the reads of a stream
        self.answers: dict[str, Any] = {}
        self.statuses: dict[str, int] = {}
        self.headers: dict[str, str] = {}  # of every answer
        self.pages: dict[str, Any] = {}  # of GET; bytes are sent as they are
        self.only_pages = False  # other paths are 404, not an empty list
        self.faults: list[str] = []  # of the bodies, by OpenAI's schema
        self.also: frozenset[str] = frozenset()  # fields that the schema lacks and the test sends

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        page = server.pages.get(self.path, {"object": "list", "data": []})
        raw = page if isinstance(page, bytes) else json.dumps(page).encode()
        missing = server.only_pages and self.path not in server.pages
        self._send(404 if missing else 200, "application/json", raw)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        assert isinstance(server, Server)
        server.asked.append((self.path, body))
        server.faults += faults(self.path, body, server.also)
        answer = server.answers[self.path]
        answer = answer(body) if callable(answer) else answer
        if isinstance(answer, list) and answer and isinstance(answer[0], bytes):
            self._stream(answer)
            return
        if isinstance(answer, list):
            lines = [f"data: {json.dumps(each)}\n\n" for each in answer] + ["data: [DONE]\n\n"]
            self._send(200, "text/event-stream", "".join(lines).encode())
            return
        status = server.statuses.get(self.path, 200)
        raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self._send(status, "application/json", raw)

    def log_message(self, *_words: object) -> None:
        return

    def _stream(self, reads: list[bytes]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for read in reads:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(read), read))
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        server = self.server
        assert isinstance(server, Server)
        for name, value in server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def upstream() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join(5)
    server.server_close()
    assert not server.faults, server.faults
