"""A server of audio and images that answers, refuses, cuts and stalls as a test tells it to."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from python_multipart.multipart import parse_options_header


@dataclass(frozen=True)
class Reply:
    body: Any = b""  # bytes, or an object that is sent as JSON
    status: int = 200
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    chunks: tuple[bytes, ...] = ()  # sent as chunks, in place of the body
    cut: bool = False  # reset the connection after the last chunk, or before any byte
    waits: bool = (
        False  # with `cut`: reset only when `may_cut` is set, as a reset discards what is unread
    )
    stall: bool = False  # send nothing more after the last chunk, or nothing at all


@dataclass(frozen=True)
class Asked:
    path: str
    kind: str
    fields: dict[str, Any]  # of JSON; of a form, with (file name, bytes) for a file


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[Asked] = []
        self.replies: dict[str, Reply] = {}
        self.released = threading.Event()
        self.may_cut = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # a gateway that gives up is expected


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._whole(Reply({"object": "list", "data": []}))

    def do_POST(self) -> None:
        kind = self.headers["content-type"]
        if self.headers.get("transfer-encoding") == "chunked":
            body = b"".join(self._chunks())
        else:
            body = self.rfile.read(int(self.headers["content-length"]))
        fields = json.loads(body) if kind == "application/json" else form_of(kind, body)
        self.server.asked.append(Asked(self.path, kind, fields))
        reply = self.server.replies[self.path]
        if not reply.chunks and reply.stall:
            self.server.released.wait(30)
            return
        if not reply.chunks and reply.cut:
            self._reset()
            return
        if not reply.chunks:
            self._whole(reply)
            return
        self.send_response(reply.status)
        self.send_header("content-type", reply.kind)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for chunk in reply.chunks:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            self.wfile.flush()
        if reply.stall:
            self.server.released.wait(30)
        elif reply.cut:
            if reply.waits:
                self.server.may_cut.wait(30)
            self._reset()
        else:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_words: object) -> None:
        return

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _whole(self, reply: Reply) -> None:
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        self.send_header("content-type", reply.kind)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _reset(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.connection.close()


def form_of(kind: str, body: bytes) -> dict[str, Any]:
    """By the standard library's parser of mail, which shares no code with the gateway's."""
    from email import message_from_bytes

    whole = message_from_bytes(b"content-type: " + kind.encode() + b"\r\n\r\n" + body)
    found: dict[str, Any] = {}
    for part in whole.get_payload():
        assert not isinstance(part, str)
        _, options = parse_options_header(part["content-disposition"])
        content = part.get_payload(decode=True)
        assert isinstance(content, bytes)
        name = options[b"name"].decode()
        file = options.get(b"filename")
        found[name] = (file.decode(), content) if file is not None else content.decode()
    return found


@contextmanager
def media_upstream() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join(5)
        server.server_close()
