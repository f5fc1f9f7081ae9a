"""Issue 14, part 7: no route, known or unknown, with or without a key, reads a body without bound.

Bytes and time are limited by the server, before any route or dependency: 413 and 408, and the
connection ends.
"""

import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.request import exchange
from tests.gateway.deployment import Deployment, running_deployment

LIMIT = 2**20
PATHS = [
    "/admin/v1/keys",
    "/v1/moderations",
    "/tokenize",
    "/healthz",
    "/nowhere",
    "/dashboard/login",
]
CHUNK = b"10000\r\n" + b"x" * 65_536 + b"\r\n"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    settings = {"max_body_mb": 1, "max_file_mb": 4}
    with running_deployment(tmp_path_factory.mktemp("bodies"), settings=settings) as made:
        yield made


def link(deployment: Deployment, path: str, header: str) -> socket.socket:
    parts = urlsplit(deployment.url)
    made = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20)
    kind = "multipart/form-data; boundary=x" if path == "/v1/files" else "application/json"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\n{header}\r\n\r\n"
    made.sendall(head.encode())
    return made


def rest(line: socket.socket) -> bytes:
    """What comes until the server ends the connection; TimeoutError if it does not."""
    got = b""
    while chunk := line.recv(65_536):
        got += chunk
    return got


@pytest.mark.parametrize("path", PATHS)
def test_an_endless_body_is_cut_off(deployment: Deployment, path: str) -> None:
    sent, got, ended = 0, b"", False
    with link(deployment, path, "transfer-encoding: chunked") as line:
        while sent < 32 * LIMIT and not ended:
            try:
                line.settimeout(20)
                line.sendall(CHUNK)
                sent += len(CHUNK)
                line.settimeout(0.002)
                received = line.recv(65_536)
                got, ended = got + received, not received
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                ended = True
    assert ended, "the server reads on"
    # A route that reads no body may have answered before.
    assert got.startswith(b"HTTP/1.1 ") and b"HTTP/1.1 5" not in got


@pytest.mark.parametrize("path", PATHS)
def test_a_declared_length_over_the_limit_is_refused_at_once(
    deployment: Deployment, path: str
) -> None:
    with link(deployment, path, "content-length: 10000000000") as line:
        got = rest(line)
    assert got.startswith(b"HTTP/1.1 413 ") and b"connection: close" in got
    assert b'"payload_too_large"' in got and b"1 MiB" in got


@pytest.mark.parametrize("path", ["/admin/v1/keys", "/v1/files", "/v1/chat/completions"])
def test_a_body_that_stops_is_cut_off_in_time(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 0.3)
    authorization = f"authorization: Bearer {deployment.key}"
    began = time.monotonic()
    with link(deployment, path, f"{authorization}\r\ncontent-length: 1000") as line:
        line.sendall(b"--x\r\n" if path == "/v1/files" else b"{")
        got = rest(line)
    assert time.monotonic() - began < 15
    assert got.startswith(b"HTTP/1.1 408 ") and b'"body_timeout"' in got


def test_an_upload_may_be_larger_than_other_bodies(deployment: Deployment) -> None:
    for size, status in ((3 * LIMIT, 200), (6 * LIMIT, 413)):
        answer = httpx.post(
            f"{deployment.url}/v1/files",
            headers=deployment.headers,
            data={"purpose": "batch"},
            files={"file": ("lines.jsonl", b"x" * size)},
            timeout=60,
        )
        assert answer.status_code == status, answer.text


def test_the_next_request_on_the_connection_is_watched_anew(deployment: Deployment) -> None:
    with httpx.Client(base_url=deployment.url, timeout=20, headers=deployment.headers) as client:
        for _ in range(3):
            answer = client.post("/v1/moderations", json={"input": "a" * (LIMIT // 2)})
            assert answer.status_code == 200, answer.text
        content = b'{"input": "' + b"a" * 2 * LIMIT + b'"}'
        assert client.post("/v1/moderations", content=content).status_code == 413
