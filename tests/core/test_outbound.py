"""Posts to addresses that tenants choose reach public hosts only, and go where they were checked."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from core.errors import BadRequest, Unavailable
from core.outbound import check_address, is_public, post_json

LOCAL = ("127.0.0.0/8",)


class _Hook:
    def __init__(self) -> None:
        hook = self
        self.seen: list[Any] = []
        self.status = 200

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                hook.seen.append((self.path, json.loads(body), self.headers["idempotency-key"]))
                self.send_response(hook.status)
                self.send_header("location", "http://169.254.169.254/latest/meta-data/")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return None

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def hook() -> Iterator[_Hook]:
    made = _Hook()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join(10)
    made.server.server_close()


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%eth0",
        "fc00::1",
        "::ffff:127.0.0.1",
        "2002:7f00:1::",
        "fec0::1",
        "192.88.99.1",
        "64:ff9b::10.0.0.1",
    ],
)
def test_what_is_not_public_is_refused(address: str) -> None:
    assert not is_public(address)


def test_public_addresses_and_the_operators_networks_are_allowed() -> None:
    assert is_public("1.1.1.1") and is_public("2606:4700:4700::1111")
    assert is_public("64:ff9b::1.1.1.1")
    assert is_public("10.1.2.3", ("10.1.0.0/16",)) and not is_public("10.2.2.3", ("10.1.0.0/16",))


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:6379/", "http://localhost/", "http://[::1]/", "http://0x7f000001/"]
)
def test_the_servers_own_network_is_not_reached(url: str) -> None:
    with pytest.raises(Unavailable):
        post_json(url, {}, {}, timeout_s=2)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "gopher://x/",
        "http://",
        "https://user:pw@host/",
        "http://h:99999/",
        "",
    ],
)
def test_what_is_no_web_address_is_refused(url: str) -> None:
    with pytest.raises(BadRequest):
        check_address(url)


def test_an_allowed_hook_gets_the_body_and_no_redirect_is_followed(hook: _Hook) -> None:
    sent = post_json(
        f"{hook.url}/alert?x=1", {"a": 1}, {"idempotency-key": "k"}, timeout_s=5, private=LOCAL
    )
    assert sent == 200 and hook.seen == [("/alert?x=1", {"a": 1}, "k")]
    hook.status = 302
    assert post_json(hook.url, {}, {}, timeout_s=5, private=LOCAL) == 302
    assert len(hook.seen) == 2


def test_a_name_that_changes_its_address_gains_nothing(
    hook: _Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resolved once: the second answer, had anybody asked, would have been another host."""
    answers = ["127.0.0.1", "169.254.169.254"]
    asked = []

    def _resolve(host: str, port: int, **_: object) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(0), port))]

    monkeypatch.setattr("core.outbound.socket.getaddrinfo", _resolve)
    port = hook.url.rpartition(":")[2]
    monkeypatch.setattr(
        "core.outbound.socket.create_connection", lambda at, timeout: _connect(at, timeout)
    )
    status = post_json(f"http://rebind.example:{port}/", {}, {}, timeout_s=5, private=LOCAL)
    assert status == 200 and asked == ["rebind.example"]


def _connect(at: tuple[str, int], timeout: float) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.settimeout(timeout)
    made.connect(at)
    return made
