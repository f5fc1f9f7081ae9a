"""What nobody writes by mistake, sent to the screen over HTTP: a clear answer, in bounded time."""

import os
import time
from typing import Any

import httpx
import pytest

from tests.gateway.deployment import Deployment

BINARY = bytes(range(256)).decode("latin-1") * 200
TEXTS = {
    "binary junk": BINARY,
    "1 MB of one character": "a" * 1_000_000,
    "1 MB of one sign": "!" * 1_000_000,
    "letters spelled without end": "k " * 100_000,
    "mixed scripts": "kіll Ωμέγα 殺す убить قتل 🙂 " * 2_000,
    "combining marks": "k\u0301\u0302\u0303" * 20_000 + "\u0301" * 50_000,
    "invisible characters": "k\u200b\u202e\U000e0041" * 20_000,
    "no text": "",
    "newlines": "\n" * 100_000,
}


def post(deployment: Deployment, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{deployment.url}{path}", json=body, headers=deployment.headers, timeout=60)


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_text_is_scored_in_bounded_time(deployment: Deployment, name: str) -> None:
    began = time.process_time()
    answer = post(deployment, "/v1/moderations", {"input": TEXTS[name]})
    # The gateway runs in this process, so this is the processor time of both sides.
    assert time.process_time() - began < 8
    assert answer.status_code == 200, answer.text[:300]
    scores = answer.json()["results"][0]["category_scores"]
    assert len(scores) == 13 and all(0 <= score <= 1 for score in scores.values())


def test_bytes_that_are_no_json_are_refused(deployment: Deployment) -> None:
    url = f"{deployment.url}/v1/moderations"
    for junk in (b"\x00\xff\xfe", os.urandom(4_096), b'{"input": "\xff"}'):
        answer = httpx.post(url, content=junk, headers=deployment.headers, timeout=60)
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://x/y.png"}}], "image"),
        ([{"type": "text", "text": "a"}, {"type": "image_url"}], "input[1]"),
        ([], "input"),
        ([7], "input[0]"),
        (["a"] * 200, "at most"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_never_zero(
    deployment: Deployment, given: Any, says: str
) -> None:
    answer = post(deployment, "/v1/moderations", {"input": given})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"input": {"categories": {"violense": {"block": 0.9}}}}, "violense"),
        ({"input": {"categories": {"violence": {"block": 7}}}}, "violence"),
        ({"input": {"patterns": [{"name": "p", "pattern": "(?=a)b"}]}}, "pattern"),
        ({"input": {"patterns": [{"name": "p", "pattern": "(a"}]}}, "pattern"),
        ({"input": {"patterns": [{"name": "p", "pattern": "((a{1000}){1000}){9}"}]}}, "pattern"),
        ({"input": {"entities": {"passport": "block"}}}, "passport"),
        ({"mood": "strict"}, "mood"),
        ({"second_stage": {"guard": "oracle"}}, "oracle"),
        ({"on_error": {"guard": "ajar"}}, "on_error"),
    ],
)
def test_a_wrong_policy_is_refused_with_its_place(
    deployment: Deployment, document: dict[str, Any], says: str
) -> None:
    url = f"{deployment.url}/admin/v1/policies"
    answer = httpx.put(url, json=document, headers=deployment.headers, timeout=60)
    assert answer.status_code == 400, answer.text
    assert says in answer.text
