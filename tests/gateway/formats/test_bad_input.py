"""Hostile and broken requests: a clear 4xx that names the field; nothing is counted."""

import json
import socket
import time
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from core.clock import SystemClock
from core.tenants import keys
from core.tenants.models import Project
from core.tenants.scope import scope_of_operator
from core.tenants.secrets import generate
from gateway.edge import http_protocol
from tests.gateway.deployment import MODEL, Deployment

PATH = "/v1/chat/completions"
TURN = {"role": "user", "content": "Hi"}
GOOD = {"model": MODEL, "messages": [TURN], "max_tokens": 2}


def send(
    deployment: Deployment, raw: bytes, headers: dict[str, str] | None = None
) -> httpx.Response:
    return httpx.post(
        f"{deployment.url}{PATH}",
        content=raw,
        headers={**deployment.headers, **(headers or {})},
        timeout=30,
    )


def changed(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def schema_of(depth: int) -> bytes:
    """A tool whose parameters are nested so deep."""
    function = {"name": "f", "parameters": "DEEP"}
    raw = changed(tools=[{"type": "function", "function": function}])
    return raw.replace(b'"DEEP"', b'{"a":' * depth + b"1" + b"}" * depth)


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
        (changed(messages=[TURN] * 90_000), "messages"),
        (changed(messages=[TURN] * 110_000), None),  # more objects than any body may have
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
        (changed(temperature=0.5).replace(b"0.5", b"1e999"), "temperature"),
        (changed(temperature=0.5).replace(b"0.5", b"-Infinity"), None),
        (changed(n=10**18), "n"),
        (changed(logit_bias={str(number): 1 for number in range(100_000)}), "logit_bias"),
        (changed(logit_bias={"5": 0.5}).replace(b"0.5", b"NaN"), None),
        (changed(stop="x" * 2**20), "stop"),
        (changed(stop="S").replace(b'"S"', b'"\\udfff"'), None),
        (schema_of(480), None),
        (schema_of(940), None),
        (schema_of(100_000), None),
        (changed(messages=[{"role": "user", "content": "long " * 2_000}]), "messages"),
    ],
)
def test_a_wrong_body_is_a_400_that_names_the_field(
    deployment: Deployment, raw: bytes, param: str | None
) -> None:
    before = len(deployment.engine.submitted)
    answer = send(deployment, raw)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    assert "Traceback" not in answer.text
    assert len(deployment.engine.submitted) == before


def test_null_bytes_and_emoji_in_a_text_are_text(deployment: Deployment) -> None:
    answer = send(deployment, changed(messages=[{"role": "user", "content": "a\x00b 🙂"}]))
    assert answer.status_code == 200


def test_a_body_over_the_bound_is_a_413(deployment: Deployment) -> None:
    answer = send(deployment, b" " * (9 * 2**20))
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "payload_too_large"


def test_a_body_in_an_unknown_encoding_is_refused_unread(deployment: Deployment) -> None:
    answer = send(deployment, b"\x1f\x8b" + b"0" * 100, {"content-encoding": "zstd"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_encoding"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Basic abc"}, 401),
        ({"authorization": f"Bearer {'x' * 5000}"}, 401),
        ({"authorization": f"Bearer {generate()}"}, 401),
        ({"x-api-key": "th_other"}, 401),
        ({"x-request-timeout-ms": "soon"}, 400),
        ({"x-request-timeout-ms": "0"}, 400),
        ({"x-request-id": "x" * 500}, 400),
    ],
)
def test_a_wrong_header_is_refused(
    deployment: Deployment, headers: dict[str, str], status: int
) -> None:
    answer = send(deployment, changed(), headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def raw_exchange(deployment: Deployment, data: bytes, *, then_close: bool = False) -> bytes:
    port = int(deployment.url.rpartition(":")[2])
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


def test_two_authorization_headers_are_refused(deployment: Deployment) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {deployment.key}\r\n"
    head += "authorization: Bearer th_b\r\ncontent-length: 2\r\n\r\n{}"
    assert b" 401 " in raw_exchange(deployment, head.encode())


def test_a_request_id_with_a_line_break_is_refused(deployment: Deployment) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {deployment.key}\r\n"
    head += "x-request-id: a\rb\r\ncontent-length: 2\r\n\r\n{}"
    assert b" 400 " in raw_exchange(deployment, head.encode())


def test_headers_of_a_megabyte_are_refused(deployment: Deployment) -> None:
    head = f"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: {'y' * 2**20}\r\n\r\n"
    assert b" 431 " in raw_exchange(deployment, head.encode())


def test_smuggled_lengths_are_refused(deployment: Deployment) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
    head += "transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    assert b" 200 " not in raw_exchange(deployment, head.encode())


def test_a_body_that_stops_half_way_counts_nothing(deployment: Deployment) -> None:
    before = len(deployment.engine.submitted)
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {deployment.key}\r\n"
    head += "content-length: 500\r\n\r\n" + '{"model": "ti'
    raw_exchange(deployment, head.encode(), then_close=True)
    assert len(deployment.engine.submitted) == before
    assert send(deployment, changed()).status_code == 200


def head_of(deployment: Deployment, *lines: str) -> bytes:
    head = [f"POST {PATH} HTTP/1.1", "host: x", f"authorization: Bearer {deployment.key}", *lines]
    return "\r\n".join([*head, "", ""]).encode()


def test_of_a_repeated_field_all_parts_of_the_gateway_read_the_same(
    deployment: Deployment,
) -> None:
    raw = changed().replace(b'"messages"', b'"messages":[{"role":"user","content":7}],"messages"')
    before = len(deployment.engine.submitted)
    answer = send(deployment, raw)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[0].content"
    two = changed().replace(b'{"model"', b'{"model":"no-such-model","model"', 1)
    assert send(deployment, two).json()["model"] == MODEL
    assert len(deployment.engine.submitted) == before + 1


def test_trailers_change_nothing_of_a_request(deployment: Deployment) -> None:
    body = changed()
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    trailers = b"authorization: Bearer th_other\r\nx-request-id: late\r\n\r\n"
    head = head_of(deployment, "transfer-encoding: chunked", "trailer: authorization")
    got = raw_exchange(deployment, head + chunks + trailers)
    assert got.startswith(b"HTTP/1.1 200 ") and b"late" not in got


def test_requests_sent_without_waiting_are_answered_in_order(deployment: Deployment) -> None:
    one = [changed(max_tokens=n) for n in (1, 2, 3)]
    data = b"".join(head_of(deployment, f"content-length: {len(each)}") + each for each in one)
    got = all_of(deployment, data, answers=3)
    answers = [json.loads(part.split(b"\r\n\r\n", 1)[1]) for part in got]
    assert [each["usage"]["completion_tokens"] for each in answers] == [1, 2, 3]


def all_of(deployment: Deployment, data: bytes, answers: int) -> list[bytes]:
    port, got = int(deployment.url.rpartition(":")[2]), b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(data)
        while got.count(b"HTTP/1.1 200") < answers or not got.endswith(b'"prompt_token_ids":null}'):
            part = line.recv(65536)
            assert part, got
            got += part
    return [b"HTTP" + part for part in got.split(b"HTTP")[1:] if part.startswith(b"/1.1 200")]


@pytest.mark.parametrize("sent", [b"", b"POST /v1/cha", b"POST / HTTP/1.1\r\nx: y\r\n"])
def test_a_head_that_never_comes_loses_its_connection(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    port = int(deployment.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(sent)
        assert line.recv(100) == b"", "closed without an answer"


def test_a_slow_second_head_on_a_kept_connection_loses_it_too(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, body, got = int(deployment.url.rpartition(":")[2]), changed(), b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(head_of(deployment, f"content-length: {len(body)}") + body)
        while not got.endswith(b'"prompt_token_ids":null}'):
            got += line.recv(65536)
        monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
        line.sendall(b"POST /v1/cha")
        assert line.recv(100) == b""


def test_a_key_revoked_in_mid_stream_ends_the_stream_which_is_billed_as_far_as_it_came(
    deployment: Deployment,
) -> None:
    with deployment.services.database.transaction() as session:
        scope = scope_of_operator(deployment.tenant_id)
        project = session.scalars(select(Project.id)).first()
        assert project is not None
        made = keys.issue(session, scope, SystemClock(), project_id=project, name="brief")
    headers = {"authorization": f"Bearer {made.secret}"}
    deployment.engine.token_delay_s = 0.02
    try:
        body = {**GOOD, "max_tokens": 150, "stream": True}
        url = f"{deployment.url}{PATH}"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            with deployment.services.database.transaction() as session:
                keys.revoke(session, scope, SystemClock(), made.id)
            deadline = time.monotonic() + 60
            while httpx.post(url, json=GOOD, headers=headers, timeout=30).status_code != 401:
                assert time.monotonic() < deadline
            last = [line for line in lines if line][-1]
            assert "invalid_api_key" in last, "what runs ends with its right"
    finally:
        deployment.engine.token_delay_s = 0.0
    mine: list[dict[str, Any]] = []
    while not (
        mine := [e for e in deployment.events(1) if e["key_id"] == made.id and e["streamed"]]
    ):
        assert time.monotonic() < deadline + 10
        time.sleep(0.02)
    assert len(mine) == 1 and 0 < mine[0]["output_tokens"] < 150


def test_after_all_of_it_the_gateway_still_serves(deployment: Deployment) -> None:
    assert send(deployment, changed()).status_code == 200
    assert httpx.get(f"{deployment.url}/readyz", timeout=10).status_code == 200
