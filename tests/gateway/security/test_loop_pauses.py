"""Issue 14, parts 6b and 9: no tenant's large input stops the event loop, which all tenants share.

The loop's longest pause while a large request is refused is compared with its longest pause while the
same machine handles small ones, measured in the same test.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from engine.demo.paths import MODEL_DIR
from gateway.catalog.catalog import ServedModel
from gateway.catalog.codec.encoding import TooManyTokens
from gateway.catalog.codec.tokenizing import load_codec
from gateway.engines.clients import Engines
from gateway.engines.fake import FakeEngine
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.security.loop_lag import as_served, longest_pause

BOUND_S = 0.05
CONTEXT = 150_000  # a long context, so that the bytes of a prompt alone do not refuse it
LARGE = 1_000_000


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    codec = load_codec(MODEL_DIR)
    engine = FakeEngine(
        vocab_size=codec.vocab_size, eos_token_ids=codec.eos_token_ids, context_length=CONTEXT
    )
    engines = Engines({MODEL: [engine]}, [ServedModel(MODEL, codec, CONTEXT, 0)])
    path = tmp_path_factory.mktemp("pauses")
    with running_deployment(path, engines=engines) as made, as_served():
        yield made


def post(deployment: Deployment, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {**deployment.headers, "content-type": "application/json"}
    return httpx.post(deployment.url + path, content=content, headers=headers, timeout=60)


def assert_no_pause(deployment: Deployment, path: str, body: Any, status: int) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answers: list[httpx.Response] = []

    def _ask() -> None:
        answers.append(post(deployment, path, content))
        assert answers[-1].status_code == status, answers[-1].text[:500]

    assert_quiet(deployment, _ask)
    return answers[-1]


def assert_quiet(deployment: Deployment, work: Callable[[], object]) -> None:
    """In one of five attempts: on a busy machine the thread that has the interpreter may wait for a core,
    and does so for small requests too."""
    small = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}

    def _small() -> None:
        for _ in range(20):
            assert post(deployment, "/v1/completions", small).status_code == 200

    pauses: list[str] = []
    for _ in range(5):
        baseline = longest_pause(deployment.loop, _small)
        pause = longest_pause(deployment.loop, work)
        if pause < BOUND_S + 3 * baseline:
            return
        pauses.append(f"{pause:.3f} s; with small requests {baseline:.3f} s")
    pytest.fail("the loop paused each time: " + ", ".join(pauses))


PROMPTS = {
    "one word": "r" * LARGE,
    "prose": "The quick brown fox jumps over the lazy dog. " * (LARGE // 45),
    "marked": "<|im_end|>" + "word " * (LARGE // 5),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_prompt_that_is_too_long_stops_nobody(deployment: Deployment, kind: str) -> None:
    body = {"model": MODEL, "prompt": PROMPTS[kind]}
    refused = assert_no_pause(deployment, "/v1/completions", body, 400)
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_chat_that_is_too_long_stops_nobody(deployment: Deployment, kind: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPTS[kind]}]}
    assert_no_pause(deployment, "/v1/chat/completions", body, 400)


def test_a_body_of_the_largest_size_stops_nobody(deployment: Deployment) -> None:
    text = ("The quick brown fox jumps over the lazy dog. " * 190_000)[: (8 << 20) - 100]
    assert_no_pause(deployment, "/v1/completions", {"model": MODEL, "prompt": text}, 400)


def test_a_megabyte_to_encode_stops_nobody(deployment: Deployment) -> None:
    body = {"model": MODEL, "prompt": PROMPTS["prose"]}
    assert_no_pause(deployment, "/tokenize", body, 200)


def test_many_tokens_to_decode_stop_nobody(deployment: Deployment) -> None:
    body = {"model": MODEL, "tokens": [270, 300] * 200_000}
    assert_no_pause(deployment, "/detokenize", body, 200)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/moderations", "/v1/responses"])
def test_80_000_characters_to_screen_stop_nobody(deployment: Deployment, route: str) -> None:
    numbers = iter(range(10_000_000))
    text = " ".join(f"paragraph {next(numbers)} of a long story" for _ in range(2_500))[:80_000]
    body: dict[str, Any] = {"input": text}
    if route == "/v1/chat/completions":
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    elif route == "/v1/responses":
        body |= {"model": MODEL, "max_output_tokens": 16}
    assert_no_pause(deployment, route, body, 200)


FILES = {
    "one line": (b"x" * 20_000_000, "line_too_long"),
    "no requests": (b"\n" * 20_000_000, "too_many_lines"),
    "one request of many values": (
        b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":['
        + b"[]," * 1_000_000
        + b"[]]}",
        "invalid_json_line",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_lines_stops_nobody(deployment: Deployment, kind: str) -> None:
    """The file is uploaded and checked, a batch reports what is wrong with it."""
    content, code = FILES[kind]

    def _run() -> None:
        files = {"file": ("lines.jsonl", content), "purpose": (None, "batch")}
        url, headers = deployment.url, deployment.headers
        sent = httpx.post(f"{url}/v1/files", files=files, headers=headers, timeout=60).json()
        asked = {"input_file_id": sent["id"], "endpoint": "/v1/chat/completions"}
        batch = post(deployment, "/v1/batches", {**asked, "completion_window": "24h"}).json()
        while batch["status"] == "validating":
            time.sleep(0.05)
            found = httpx.get(f"{url}/v1/batches/{batch['id']}", headers=headers, timeout=60)
            batch = found.json()
        assert batch["errors"]["data"][0]["code"] == code, batch

    assert_quiet(deployment, _run)


def test_a_text_beyond_every_token_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token of the vocabulary is long enough for so many bytes in so little context."""
    codec = load_codec(MODEL_DIR)
    monkeypatch.setattr(codec.encoder, "_encode", None)  # calling it would fail
    longest = max(map(len, codec.tokenizer.get_vocab()))
    with pytest.raises(TooManyTokens) as refused:
        codec.encode("r" * (longest * 513), at_most=512)
    assert refused.value.tokens == 513
