"""The short way from the connection to an inference route behaves as the long way over ASGI does."""

import json
import re
import socket
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from gateway.edge.direct import DirectCycle
from tests.gateway.deployment import MODEL, Deployment

BODY = json.dumps(
    {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
).encode()


def request(deployment: Deployment, *extra: str, body: bytes = BODY) -> bytes:
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: here",
        f"Authorization: Bearer {deployment.key}",
        f"Content-Length: {len(body)}",
        *extra,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def talk(deployment: Deployment, *pieces: bytes, answers: int = 1) -> bytes:
    address = urlsplit(deployment.url)
    came = b""
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as line:
        line.settimeout(20)
        for piece in pieces:
            line.sendall(piece)
        while came.count(b"chat.completion") < answers:
            more = line.recv(65536)
            if not more:
                break
            came += more
    return came


@pytest.mark.parametrize(
    "extra", [(), ("X-Forwarded-For: 203.0.113.7",), ("Expect: 100-continue",)], ids=str
)
def test_both_ways_answer_alike(deployment: Deployment, extra: tuple[str, ...]) -> None:
    said = talk(deployment, request(deployment, *extra))
    head, _, body = said.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nx-request-id: req_" in head and b"\r\ndate: " in head
    assert f"\r\ncontent-length: {len(body)}".encode() in head
    assert json.loads(body)["usage"]["completion_tokens"] == 2


def test_a_body_that_comes_in_pieces_is_read_whole(deployment: Deployment) -> None:
    whole = request(deployment)
    assert b"200 OK" in talk(deployment, whole[:-20], whole[-20:-5], whole[-5:])


def test_requests_sent_ahead_are_answered_in_their_order(deployment: Deployment) -> None:
    first = request(deployment, "X-Request-Id: one")
    broken = request(deployment, body=b'{"model": 7}')
    said = talk(deployment, first + broken + request(deployment, "Connection: close"), answers=99)
    assert re.findall(rb"HTTP/1.1 (\d+)", said) == [b"200", b"400", b"200"]


def test_a_line_break_in_a_header_is_never_written() -> None:
    cycle: Any = SimpleNamespace(default_headers=[], keep_alive=True)
    assert DirectCycle.head(cycle, 200, [(b"a", b"b")]) == b"HTTP/1.1 200 OK\r\na: b\r\n\r\n"
    for forged in (b"x\r\nset-cookie: y", b"x\ny", b"x\ry"):
        with pytest.raises(ValueError, match="line break"):
            DirectCycle.head(cycle, 200, [(b"a", forged)])
