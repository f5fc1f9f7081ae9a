"""Clients that leave, engines that die, money that ends: each is billed to the token, once."""

import json
import random
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.gateway.deployment import MODEL, Deployment, running_deployment

BODY = {
    "model": MODEL,
    "max_tokens": 200,
    "ignore_eos": True,
    "stream": True,
    "messages": [{"role": "user", "content": "Tell me a long story of a road to the sea."}],
}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_deployment(tmp_path_factory.mktemp("slow"), token_delay_s=0.003) as deployment:
        yield deployment


def leave_after(deployment: Deployment, bytes_read: int) -> int:
    """Reads so much of a stream, closes the socket in its middle; returns the chunks received."""
    body = json.dumps(BODY).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {deployment.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    port = int(deployment.url.rpartition(":")[2])
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
        line.sendall(head.encode() + body)
        while len(got) < bytes_read and not got.endswith(b"0\r\n\r\n"):
            got += line.recv(4096)
    return got.count(b"data: {")


def test_a_client_that_leaves_pays_what_was_delivered_and_the_rest_is_waived(
    slow: Deployment,
) -> None:
    seed = random.Random(7)
    before = {event["request_id"] for event in slow.events(0)}
    received = [leave_after(slow, seed.randrange(10, 20_000)) for _ in range(12)]
    events = [e for e in slow.events(len(before) + 12) if e["request_id"] not in before]
    assert len(events) == 12
    by_id = {request.request_id: request for request in slow.engine.submitted}
    for event, chunks in zip(events, received, strict=True):
        receipt = slow.engine.receipts_given[event["request_id"]]
        assert event["output_tokens"] + event["waived_tokens"] == receipt.generated
        assert event["input_tokens"] == receipt.prompt == len(by_id[event["request_id"]].prompt)
        assert chunks <= event["output_tokens"] + 1
        assert (event["status"], event["finish_reason"]) in (
            (499, "client_closed"),
            (200, "length"),
        )
    assert any(event["status"] == 499 for event in events)


def test_the_engine_stops_working_for_a_client_that_left(slow: Deployment) -> None:
    leave_after(slow, 3_000)
    deadline = time.monotonic() + 60
    while slow.engine.stats().running and time.monotonic() < deadline:  # type: ignore[union-attr]
        time.sleep(0.01)
    assert slow.engine.stats().running == 0  # type: ignore[union-attr]
    newest = slow.engine.submitted[-1].request_id
    assert slow.engine.receipts_given[newest].generated < BODY["max_tokens"]


@pytest.fixture
def slower(slow: Deployment) -> Iterator[Deployment]:
    """An answer takes ten seconds: a busy machine has begun it in one, and a fast one has not ended."""
    plain, slow.engine.token_delay_s = slow.engine.token_delay_s, 0.05
    yield slow
    slow.engine.token_delay_s = plain


def test_a_client_that_leaves_before_an_unstreamed_answer_pays_no_output(
    slower: Deployment,
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{slower.url}/v1/chat/completions",
            json={**BODY, "stream": False},
            headers=slower.headers,
            timeout=1.5,
        )
    event = slower.last_event()
    assert (event["status"], event["output_tokens"]) == (499, 0)
    assert event["waived_tokens"] > 0


def test_a_deadline_ends_a_stream_with_an_error_event(slower: Deployment) -> None:
    answer = httpx.post(
        f"{slower.url}/v1/chat/completions",
        json=BODY,
        headers={**slower.headers, "x-request-timeout-ms": "1500"},
        timeout=60,
    )
    frames = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert json.loads(frames[-1])["error"]["code"] == "deadline_exceeded"
    event = slower.last_event()
    shown = sum('"finish_reason":null' in frame for frame in frames)
    assert event["output_tokens"] >= shown > 0
    assert event["output_tokens"] + event["waived_tokens"] < BODY["max_tokens"]


def test_an_engine_that_dies_ends_its_streams_and_only_what_arrived_is_billed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with running_deployment(tmp_path_factory.mktemp("dying"), token_delay_s=0.01) as deployment:
        with httpx.stream(
            "POST",
            f"{deployment.url}/v1/chat/completions",
            json=BODY,
            headers=deployment.headers,
            timeout=60,
        ) as answer:
            lines = answer.iter_lines()
            seen = [next(lines) for _ in range(11)]
            deployment.call(deployment.engine.die)
            seen += list(lines)
        frames = [json.loads(line[6:]) for line in seen if line.startswith("data: {")]
        assert frames[-1]["error"]["code"] == "engine_unavailable"
        event = deployment.last_event()
        assert event["status"] == 503 and 0 < event["output_tokens"] < BODY["max_tokens"]
        refused = httpx.post(
            f"{deployment.url}/v1/chat/completions",
            json=BODY,
            headers=deployment.headers,
            timeout=60,
        )
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert len(deployment.events(1)) == 1
