"""A hub on 127.0.0.1 with one repository, as far as a snapshot needs it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40
REPOSITORY = "someone/tiny"


@dataclass
class StubHub:
    files: dict[str, bytes]
    status: int = 200  # of every answer
    error_code: str = ""  # the hub's X-Error-Code
    cut: bool = False  # weights end half-way
    most: int = 0  # each answer's body ends after so many bytes of a large file
    ranges: str = "honoured"  # or "ignored", "wrong", "refused"
    spoilt: str = ""  # a byte of this file is another than its checksum says
    url: str = ""
    fetched: list[str] = field(default_factory=list)  # names of files, each GET
    asked: list[str] = field(default_factory=list)  # the Range of each GET of weights


@contextmanager
def stub_hub(files: dict[str, bytes]) -> Iterator[StubHub]:
    hub = StubHub(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            if hub.status != 200:
                headers = {"X-Error-Code": hub.error_code} if hub.error_code else {}
                self._send(hub.status, b"{}", headers, body=body)
            elif path.startswith(f"/api/models/{REPOSITORY}/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                    for name, data in hub.files.items()
                ]
                self._send(200, json.dumps(tree).encode(), {}, body=body)
            elif path.startswith(f"/api/models/{REPOSITORY}"):
                names = [{"rfilename": name} for name in hub.files]
                told = {"id": REPOSITORY, "sha": COMMIT, "siblings": names}
                self._send(200, json.dumps(told).encode(), {}, body=body)
            elif path.startswith(f"/{REPOSITORY}/resolve/"):
                self._file(path.split("/", 5)[5], body=body)
            else:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)

        def _file(self, name: str, *, body: bool) -> None:
            data = hub.files[name]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(data)}"'}
            if name.endswith(".safetensors"):  # the hub stores large files apart
                headers["X-Linked-ETag"] = f'"{hashlib.sha256(data).hexdigest()}"'
                headers["X-Linked-Size"] = str(len(data))
            if name == hub.spoilt:
                data = data[:-1] + bytes([data[-1] ^ 1])
            status = 200
            if body:
                hub.fetched.append(name)
            if body and name.endswith(".safetensors"):
                status, data = self._part(data, headers)
            self._send(status, data, headers, body=body)

        def _part(self, data: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
            wanted = self.headers.get("Range", "")
            hub.asked.append(wanted)
            if not wanted or hub.ranges == "ignored":
                return 200, data
            begin = int(wanted.removeprefix("bytes=").rstrip("-"))
            if hub.ranges == "refused" or begin >= len(data):
                return 416, b""
            begin = max(0, begin - 7) if hub.ranges == "wrong" else begin
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            return 206, data[begin:]

        def _send(self, status: int, data: bytes, headers: dict[str, str], *, body: bool) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                short = hub.cut and len(data) > 50_000
                most = hub.most or len(data)
                self.wfile.write(data[: len(data) // 2] if short else data[:most])
            if body and (hub.cut or 0 < hub.most < len(data)):
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join(60)


def _etag(data: bytes) -> str:
    """Git's object id, as the hub gives it for small files."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
