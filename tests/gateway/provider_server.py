"""A provider for tests: says what it is told to say, and keeps what it was asked, with the headers."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from msgspec import Struct, field

SSE = "text/event-stream"


class Said(Struct):
    """An answer. A list of texts is sent in as many writes."""

    body: bytes | list[bytes]
    kind: str = "application/json"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False  # the connection ends in the middle of the body


class Asked(Struct):
    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


def whole(answer: Any, status: int = 200, **headers: str) -> Said:
    return Said(json.dumps(answer).encode(), status=status, headers=headers)


def named_events(events: list[dict[str, Any]], size: int = 0) -> Said:
    """Server-sent events with their types as names. `size`: bytes of a write; 0: all at once."""
    text = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events)
    return Said(pieces(text.encode(), size), SSE)


def plain_events(events: list[dict[str, Any]], size: int = 0, *, done: bool = False) -> Said:
    text = "".join(f"data: {json.dumps(each)}\n\n" for each in events)
    return Said(pieces((text + "data: [DONE]\n\n" * done).encode(), size), SSE)


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)] if size else [data]


class Provider(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[Asked] = []
        self.said: Said | Callable[[Asked], Said] = whole({})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def last(self) -> Asked:
        return self.asked[-1]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        server = self.server
        assert isinstance(server, Provider)
        asked = Asked(self.path, {k.lower(): v for k, v in self.headers.items()}, raw)
        server.asked.append(asked)
        said = server.said(asked) if callable(server.said) else server.said
        writes = said.body if isinstance(said.body, list) else [said.body]
        self.send_response(said.status)
        self.send_header("content-type", said.kind)
        for name, value in said.headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(sum(map(len, writes)) + said.cut))
        self.end_headers()
        for each in writes:
            self.wfile.write(each)
            self.wfile.flush()
        self.close_connection = said.cut

    def log_message(self, *_words: object) -> None:
        return


@contextmanager
def provider() -> Iterator[Provider]:
    made = Provider()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()
        thread.join()
