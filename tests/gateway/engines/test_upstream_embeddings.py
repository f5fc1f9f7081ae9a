"""Embeddings of upstreams: numbers in whatever form the server sends them, and texts far too long."""

import base64
import json
import random
import struct
import time
from typing import Any

import httpx
import orjson
import pytest

from gateway.formats.embeddings import _encode_vector
from tests.gateway.deployment import MODEL, running_deployment
from tests.gateway.fake_upstream import upstream

RNG = random.Random(7)
NUMBERS = [RNG.uniform(-0.2, 0.2) for _ in range(384)]
UNIT = [1.0 if place == 5 else 0.0 for place in range(384)]


def sent(numbers: list[float], kind: str) -> bytes:
    if kind == "list":
        return json.dumps(numbers).encode()
    return json.dumps(
        base64.b64encode(struct.pack(f"<{len(numbers)}{kind}", *numbers)).decode()
    ).encode()


@pytest.mark.parametrize("form", ["float", "base64"])
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        *((kind, numbers) for kind in ("list", "f", "d") for numbers in (NUMBERS, NUMBERS[:16])),
        ("list", UNIT),
        ("f", UNIT),
    ],
)
def test_a_vector_has_its_numbers_in_the_form_that_is_asked_for(
    kind: str, form: str, numbers: list[float]
) -> None:
    read: Any = _encode_vector(sent(numbers, kind), form)
    read = orjson.loads(orjson.dumps(read))
    if form == "base64":
        raw = base64.b64decode(read)
        read = list(struct.unpack(f"<{len(raw) // 4}f", raw))
    assert read == pytest.approx(numbers, abs=1e-7)


def test_a_text_far_longer_than_the_context_is_refused_before_it_is_screened(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with upstream() as server:
        entry = {"url": server.url, "name": "u", "model": MODEL, "context_length": 512}
        entry["capabilities"] = ["embeddings"]
        folder = tmp_path_factory.mktemp("embedding")
        settings = {"upstreams": json.dumps([entry])}
        with running_deployment(folder, engines=None, settings=settings) as made:
            before = time.monotonic()
            answer = httpx.post(
                f"{made.url}/v1/embeddings",
                json={"model": MODEL, "input": "a " * 500_000},
                headers=made.headers,
                timeout=60,
            )
            took = time.monotonic() - before
        assert answer.status_code == 400 and not server.asked
        assert answer.json()["error"]["code"] == "context_length_exceeded" and took < 3
