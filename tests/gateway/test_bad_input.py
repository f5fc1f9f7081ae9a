"""Hostile and broken requests: a clear 4xx that names the field, nothing counted, the house stands."""

import json
import socket
from typing import Any

import httpx
import pytest

from core.tenants.secrets import mint
from tests.gateway.served import MODEL, House

PATH = "/v1/chat/completions"
TURN = {"role": "user", "content": "Hi"}
GOOD = {"model": MODEL, "messages": [TURN], "max_tokens": 2}


def send(house: House, raw: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.post(
        f"{house.url}{PATH}", content=raw, headers={**house.headers, **(headers or {})}, timeout=30
    )


def changed(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"null", None),
        (b'{"model": "tiny"', None),
        (b"[" * 100_000, None),
        (b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', None),
        (b'{"model":"tiny","messages":[{"role":"user","content":"\xff\xfe"}]}', None),
        (changed(temperature=0.5).replace(b"0.5", b"NaN"), None),
        (changed(temperature="hot"), "temperature"),
        (changed(temperature=3), "temperature"),
        (changed(max_tokens=-1), "max_tokens"),
        (changed(max_tokens=10**30), "max_tokens"),
        (changed(n=1000), "n"),
        (changed(seed=2**70), "seed"),
        (changed(stop=["x"] * 10_000), "stop"),
        (changed(stop=["x" * 10_000]), "stop"),
        (changed(stop=[""]), "stop"),
        (changed(messages=[TURN] * 100_000), "messages"),
        (changed(messages=[{"role": "wizard", "content": "Hi"}]), "messages[0].role"),
        (changed(messages=[{"role": "user"}]), "messages[0].content"),
        (changed(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), None),
        (changed(logit_bias={"me": 1}), "logit_bias"),
        (changed(logit_bias={"5": 1000}), "logit_bias"),
        (changed(user="a\x00b"), "user"),
        (changed(user="x" * 1000), "user"),
        (changed(stream_options={"include_usage": True}), "stream_options"),
        (changed(top_logprobs=3), "top_logprobs"),
        (changed(model=7), "model"),
        (changed(messages=[{"role": "user", "content": "long " * 2_000}]), "messages"),
    ],
)
def test_a_wrong_body_is_a_400_that_names_the_field(
    house: House, raw: bytes, param: str | None
) -> None:
    before = len(house.engine.submitted)
    answer = send(house, raw)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    assert "Traceback" not in answer.text
    assert len(house.engine.submitted) == before


def test_null_bytes_and_emoji_in_a_text_are_text(house: House) -> None:
    answer = send(house, changed(messages=[{"role": "user", "content": "a\x00b 🙂"}]))
    assert answer.status_code == 200


def test_a_body_over_the_bound_is_a_413(house: House) -> None:
    answer = send(house, b" " * (9 * 2**20))
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "payload_too_large"


def test_a_compressed_body_is_refused_unread(house: House) -> None:
    answer = send(house, b"\x1f\x8b" + b"0" * 100, {"content-encoding": "gzip"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_encoding"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Basic abc"}, 401),
        ({"authorization": f"Bearer {'x' * 5000}"}, 401),
        ({"authorization": f"Bearer {mint()}"}, 401),
        ({"x-api-key": "th_other"}, 401),
        ({"x-request-timeout-ms": "soon"}, 400),
        ({"x-request-timeout-ms": "0"}, 400),
        ({"x-request-id": "x" * 500}, 400),
    ],
)
def test_a_wrong_header_is_refused(house: House, headers: dict[str, str], status: int) -> None:
    answer = send(house, changed(), headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def raw_exchange(house: House, data: bytes, *, then_close: bool = False) -> bytes:
    port = int(house.url.rpartition(":")[2])
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        try:
            line.sendall(data)
            if then_close:
                line.shutdown(socket.SHUT_WR)
            while part := line.recv(65536):
                got += part
                if b"\r\n\r\n" in got:
                    break
        except (ConnectionError, TimeoutError):
            pass
    return got


def test_two_authorization_headers_are_refused(house: House) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {house.key}\r\n"
    head += "authorization: Bearer th_b\r\ncontent-length: 2\r\n\r\n{}"
    assert b" 401 " in raw_exchange(house, head.encode())


def test_a_request_id_with_a_line_break_is_refused(house: House) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {house.key}\r\n"
    head += "x-request-id: a\rb\r\ncontent-length: 2\r\n\r\n{}"
    assert b" 400 " in raw_exchange(house, head.encode())


def test_headers_of_a_megabyte_are_refused(house: House) -> None:
    head = f"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: {'y' * 2**20}\r\n\r\n"
    assert b" 431 " in raw_exchange(house, head.encode())


def test_smuggled_lengths_are_refused(house: House) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
    head += "transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    assert b" 200 " not in raw_exchange(house, head.encode())


def test_a_body_that_stops_half_way_counts_nothing(house: House) -> None:
    before = len(house.engine.submitted)
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {house.key}\r\n"
    head += "content-length: 500\r\n\r\n" + '{"model": "ti'
    raw_exchange(house, head.encode(), then_close=True)
    assert len(house.engine.submitted) == before
    assert send(house, changed()).status_code == 200


def test_after_all_of_it_the_house_stands(house: House) -> None:
    assert send(house, changed()).status_code == 200
    assert httpx.get(f"{house.url}/readyz", timeout=10).status_code == 200
