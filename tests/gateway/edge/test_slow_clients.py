"""Clients that send slowly, stop half-way or read slowly: bounded in time and memory, billed right."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.demo.paths import MODEL_DIR
from gateway.answers import delivery
from gateway.catalog.catalog import ServedModel
from gateway.catalog.codec.tokenizing import load_codec
from gateway.edge import direct
from gateway.engines.clients import Engines
from gateway.engines.fake import FakeEngine
from gateway.request import exchange
from tests.gateway.deployment import MODEL, Deployment, running_deployment

CHAT = "/v1/chat/completions"
SMALL = [CHAT, "/v1/moderations", "/tokenize", "/v1/batches", "/v1/messages/count_tokens"]
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_deployment(tmp_path_factory.mktemp("slow"), token_delay_s=0.4) as deployment:
        yield deployment


def link(deployment: Deployment) -> socket.socket:
    return socket.create_connection(
        ("127.0.0.1", int(deployment.url.rpartition(":")[2])), timeout=60
    )


def head(deployment: Deployment, length: int, path: str = CHAT) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {deployment.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/moderations", "/tokenize", "/v1/batches", "/v1/messages/count_tokens"]
)
def test_a_body_that_drips_is_cut_off_in_time(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 0.3)
    before = len(deployment.engine.submitted)
    with link(deployment) as line:
        line.sendall(head(deployment, 10_000, path))
        began, got = time.monotonic(), b""
        line.settimeout(0.05)
        while b"did not arrive within" not in got and time.monotonic() - began < 25:
            try:
                line.sendall(b" ")
                got += line.recv(4096)
            except TimeoutError:
                continue
    assert b" 408 " in got.split(b"\r\n")[0] and b"did not arrive within" in got
    assert time.monotonic() - began < 25, "the plain bound is 30 s"
    assert len(deployment.engine.submitted) == before


def test_many_bodies_that_never_end_leave_room_for_others(deployment: Deployment) -> None:
    lines = [link(deployment) for _ in range(100)]
    try:
        for line in lines:
            line.sendall(head(deployment, 10_000) + b'{"model":')
        began = time.monotonic()
        answer = httpx.post(
            f"{deployment.url}{CHAT}", json=BODY, headers=deployment.headers, timeout=60
        )
        assert answer.status_code == 200 and time.monotonic() - began < 20
    finally:
        for line in lines:
            line.close()


def test_a_silent_stream_gets_keep_alive_comments(
    slow: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle proxy must not cut it, and an SDK must not mind."""
    limits = slow.services.pipeline.limits
    monkeypatch.setattr(
        slow.services.pipeline, "limits", type(limits)(limits.max_body, limits.timeout_s, 0.1)
    )
    body = {**BODY, "stream": True}
    answer = httpx.post(f"{slow.url}{CHAT}", json=body, headers=slow.headers, timeout=60)
    assert answer.text.count(": keep-alive\n\n") >= 3
    frames = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    told = [json.loads(frame)["choices"][0]["finish_reason"] for frame in frames]
    assert told[-1] == "length"
    from openai import OpenAI

    with OpenAI(base_url=f"{slow.url}/v1", api_key=slow.key, max_retries=0) as client:
        chunks = list(client.chat.completions.create(**body))  # type: ignore[call-overload]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_client_that_does_not_read_holds_a_bounded_buffer_and_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "WRITE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(exchange, "WRITE_TIMEOUT_S", 1.0)
    codec = load_codec(MODEL_DIR)
    engine = FakeEngine(
        vocab_size=codec.vocab_size, eos_token_ids=codec.eos_token_ids, context_length=16_384
    )
    engines = Engines({MODEL: [engine]}, [ServedModel(MODEL, codec, 16_384, 0)])
    with running_deployment(tmp_path, engines=engines, send_buffer=4096) as deployment:
        asked = {**BODY, "max_tokens": 16_000, "n": 8, "stream": True, "ignore_eos": True}
        body = json.dumps(asked).encode()
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect(("127.0.0.1", int(deployment.url.rpartition(":")[2])))
            line.sendall(head(deployment, len(body)) + body)
            event = deployment.events(1, timeout_s=30)[0]
        receipt = engine.receipts_given[event["request_id"]]
        assert event["output_tokens"] + event["waived_tokens"] == receipt.generated
        assert event["status"] == 499, "the whole answer fitted into the buffers"
        assert event["waived_tokens"] > 0


@pytest.mark.parametrize(("most", "stalled", "taken"), [(1 << 60, 5_000, 0), (20_000, 1 << 60, 1)])
def test_a_generation_ends_for_a_client_that_does_not_read_its_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, stalled: int, taken: int
) -> None:
    """Long before the client is let go, and with log-probabilities sooner than without: for one that
    takes nothing, and for one that takes a little now and then."""
    monkeypatch.setattr(delivery, "MOST_UNREAD", most)
    monkeypatch.setattr(delivery, "MOST_UNREAD_STALLED", stalled)
    monkeypatch.setattr(delivery, "STALLED_S", 1.0)
    codec = load_codec(MODEL_DIR)
    engine = FakeEngine(
        vocab_size=codec.vocab_size,
        eos_token_ids=codec.eos_token_ids,
        context_length=16_384,
        token_delay_s=0.002,
    )
    engines = Engines({MODEL: [engine]}, [ServedModel(MODEL, codec, 16_384, 0)])
    with running_deployment(tmp_path, engines=engines, send_buffer=4096) as deployment:
        asked = {**BODY, "max_tokens": 16_000, "n": 4, "stream": True, "ignore_eos": True}
        body = json.dumps(asked | {"logprobs": True, "top_logprobs": 20}).encode()
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect(("127.0.0.1", int(deployment.url.rpartition(":")[2])))
            line.sendall(head(deployment, len(body)) + body)
            deadline = time.monotonic() + 60
            while not engine.receipts_given:
                assert time.monotonic() < deadline
                line.recv(taken) if taken else None
                time.sleep(0.05)
            event = deployment.events(1, timeout_s=30)[0]
        receipt = engine.receipts_given[event["request_id"]]
        assert event["status"] == 499 and receipt.generated < 20_000
        assert event["output_tokens"] + event["waived_tokens"] == receipt.generated


def test_a_slow_reader_gets_everything(slow: Deployment) -> None:
    """Slower than the engine, yet reading: nothing is lost and nothing waived."""
    with httpx.stream(
        "POST",
        f"{slow.url}{CHAT}",
        json={**BODY, "stream": True},
        headers=slow.headers,
        timeout=60,
    ) as answer:
        text = ""
        for part in answer.iter_text(64):
            text += part
            time.sleep(0.01)
    assert text.endswith("data: [DONE]\n\n")
    event = slow.last_event()
    assert (event["output_tokens"], event["waived_tokens"], event["status"]) == (3, 0, 200)
