"""The wire: smuggled requests, bombs and split headers are refused; credentials reach no log."""

import gzip
import json
import logging
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.gateway.deployment import Deployment, running_deployment

CHAT = "/v1/chat/completions"
BODY = json.dumps(
    {"model": "tiny", "messages": [{"role": "user", "content": "sesame-and-lilies"}]}
).encode()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    settings = {"admin_token": "operators-token-of-this-test", "max_body_mb": 1}
    with running_deployment(tmp_path_factory.mktemp("wire"), settings=settings) as made:
        yield made


def _raw(deployment: Deployment, head: str, body: bytes = b"") -> bytes:
    """Everything that comes back until the server closes or falls silent."""
    parts = urlsplit(deployment.url)
    answer = b""
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=5) as link:
        link.sendall(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n" + body)
        link.settimeout(1)
        try:
            while chunk := link.recv(65_536):
                answer += chunk
        except (TimeoutError, ConnectionResetError):
            return answer
    return answer


def _head(deployment: Deployment, *lines: str) -> str:
    first = f"POST {CHAT} HTTP/1.1\nhost: x\nauthorization: Bearer {deployment.key}\n"
    return first + "content-type: application/json\n" + "".join(f"{line}\n" for line in lines)


def _answers(raw: bytes) -> list[bytes]:
    return [part[:3] for part in raw.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize(
    "lines",
    [
        ("content-length: 4", "transfer-encoding: chunked"),
        ("transfer-encoding: chunked", "content-length: 4"),
        ("content-length: 5", f"content-length: {len(BODY)}"),
        ("transfer-encoding: chunked, identity",),
        ("content-length: +4",),
        ("content-length: 4\x0b",),
    ],
)
def test_a_smuggled_request_is_never_served(deployment: Deployment, lines: tuple[str, ...]) -> None:
    smuggled = f"GET /v1/models HTTP/1.1\nhost: x\nauthorization: Bearer {deployment.key}\n\n"
    raw = _raw(
        deployment,
        _head(deployment, *lines),
        b"0\r\n\r\n" + smuggled.replace("\n", "\r\n").encode(),
    )
    assert not [status for status in _answers(raw) if status.startswith(b"2")], raw
    assert len(_answers(raw)) <= 1, raw


def test_a_line_break_in_a_request_id_splits_no_header(deployment: Deployment) -> None:
    lines = (
        f"content-length: {len(BODY)}",
        "x-request-id: a\r\n injected: yes",
        "connection: close",
    )
    raw = _raw(deployment, _head(deployment, *lines), BODY)
    assert b"injected" not in raw.split(b"\r\n\r\n")[0]


def test_a_header_of_a_megabyte_is_refused(deployment: Deployment) -> None:
    raw = _raw(deployment, _head(deployment, "x-padding: " + "a" * 2**20, "content-length: 0"))
    assert not [status for status in _answers(raw) if status.startswith((b"2", b"5"))]


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
def test_a_compressed_body_is_not_unpacked(deployment: Deployment, coding: str) -> None:
    bomb = gzip.compress(bytes(32 * 2**20))
    headers = deployment.headers | {"content-encoding": coding, "content-type": "application/json"}
    answer = httpx.post(deployment.url + CHAT, content=bomb, headers=headers, timeout=60)
    assert answer.status_code in (400, 413, 415), answer.text


def test_a_body_past_the_bound_is_cut_off_however_it_comes(deployment: Deployment) -> None:
    def _chunks() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * 65_536

    for content in (b" " * (2 * 2**20), _chunks()):
        headers = deployment.headers | {"content-type": "application/json"}
        try:
            answer = httpx.post(deployment.url + CHAT, content=content, headers=headers, timeout=60)
        except (httpx.WriteError, httpx.ReadError):
            continue  # the gateway closed while the body was still coming
        assert answer.status_code == 413, answer.text


def test_two_credentials_are_refused(deployment: Deployment) -> None:
    line = f"authorization: Bearer {deployment.key}"
    raw = _raw(
        deployment,
        _head(deployment, line, f"content-length: {len(BODY)}", "connection: close"),
        BODY,
    )
    assert _answers(raw) == [b"401"]


def test_credentials_and_prompts_reach_no_log(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = deployment.key[:-1] + ("A" if deployment.key[-1] != "A" else "B")
    token = "operators-token-of-this-test"
    with (
        caplog.at_level(logging.DEBUG),
        httpx.Client(base_url=deployment.url, timeout=60) as client,
    ):
        for secret in (deployment.key, wrong, token, "th_short", "sk-something-else"):
            headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
            client.post(CHAT, content=BODY, headers=headers)
            client.get("/admin/v1/keys", headers=headers, params={"tenant": "demo"})
        origin = {"origin": deployment.url}
        form = {"email": "a@b.example", "password": "a-password-of-this-test"}
        client.post("/dashboard/sign-in", data=form, headers=origin)
        client.post("/dashboard/sign-in", data={"secret": deployment.key}, headers=origin)
    logged = "\n".join(
        record.getMessage() + str(record.exc_info or "")
        for record in caplog.records
        if not record.name.startswith(("httpcore", "httpx"))  # the test's own client
    )
    secrets = (deployment.key, wrong, token, "sesame-and-lilies", "a-password-of-this-test")
    assert not [secret for secret in secrets if secret in logged]


def test_a_wrong_key_costs_an_address_and_no_other(deployment: Deployment) -> None:
    with httpx.Client(base_url=deployment.url, timeout=60) as client:
        wrong = {"authorization": "Bearer th_" + "0" * 38}
        answers = {client.get("/v1/models", headers=wrong).status_code for _ in range(60)}
        assert answers == {401, 429}
        known = client.get("/v1/models", headers=deployment.headers)
    assert known.status_code == 200  # a key that was checked before still works from there


@pytest.mark.parametrize("path", [CHAT, "/v1/moderations"])
def test_a_trailer_never_becomes_a_header(deployment: Deployment, path: str) -> None:
    """Neither a key, nor an address, of a request whose head was checked without it."""
    body = BODY.decode() if path == CHAT else '{"input": "x"}'
    head = f"POST {path} HTTP/1.1\nhost: x\ncontent-type: application/json\n"
    trailer = f"0\r\nauthorization: Bearer {deployment.key}\r\n\r\n"
    chunked = f"{len(body):x}\r\n{body}\r\n{trailer}".encode()
    raw = _raw(deployment, head + "transfer-encoding: chunked\n", chunked)
    assert _answers(raw) == [b"401"], raw


def test_two_hosts_are_refused(deployment: Deployment) -> None:
    head = _head(deployment, "host: other", f"content-length: {len(BODY)}")
    raw = _raw(deployment, head, BODY)
    assert _answers(raw) == [b"400"] and b"more than one Host" in raw, raw
    length = int(raw.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    assert len(raw.partition(b"\r\n\r\n")[2]) == length
