"""Prompts for upstreams whose tokenizer is not known: what is counted, and what is refused."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.demo.paths import MODEL_DIR
from gateway.catalog.codec.tokenizing import load_codec
from gateway.prompts.prompt import Prompt
from gateway.prompts.truncation import counted_texts, estimate, most_tokens
from gateway.request.inference import InferenceRequest
from gateway.screening.moderator import Moderator
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream

CODEC = load_codec(MODEL_DIR)
TOOL = {
    "type": "function",
    "function": {"name": "lookup", "description": "word " * 4000, "parameters": {}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": "y" * 4000}}


@given(st.lists(st.text(max_size=200), min_size=1, max_size=5))
def test_no_tokenizer_finds_more_tokens_than_are_reserved(texts: list[str]) -> None:
    found = sum(len(CODEC.encode(text)) for text in texts)
    assert found <= most_tokens(texts)


def chat(*messages: dict[str, Any], **more: Any) -> InferenceRequest:
    return InferenceRequest("/v1/chat/completions", "m", messages=list(messages), **more)


def test_tools_calls_and_names_count() -> None:
    plain = {"role": "user", "content": "Hi"}
    base = estimate(counted_texts(chat(plain)))
    with_tool = estimate(counted_texts(chat(plain, tools=[TOOL])))
    assert with_tool - base >= len(json.dumps(TOOL, separators=(",", ":"))) // 4
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert estimate(counted_texts(chat(plain, called))) - base >= 1000
    named = {**plain, "name": "n" * 400}
    assert estimate(counted_texts(chat(named))) - base >= 100


def test_the_reservation_is_never_below_the_count() -> None:
    assert Prompt(chat(), [0] * 9, 1).reserved_tokens == 9
    assert Prompt(chat(), [0] * 9, 1, most_tokens=30).reserved_tokens == 30


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with upstream() as made:
        yield made


@pytest.fixture(scope="module")
def reseller(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    entry = {"url": server.url, "name": "u", "model": MODEL, "capabilities": ["embeddings"]}
    path = tmp_path_factory.mktemp("reseller")
    with running_deployment(
        path, engines=None, settings={"upstreams": json.dumps([entry])}
    ) as deployment:
        yield deployment


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": list(range(5000))}, "prompt"),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}, "prompt"),
        ("/v1/embeddings", {"input": [1, 2, 3]}, "input"),
        ("/v1/embeddings", {"input": [[1, 2, 3]]}, "input"),
    ],
)
def test_token_ids_are_refused(
    reseller: Deployment, server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    before = len(server.asked)
    answer = httpx.post(
        f"{reseller.url}{path}", json={"model": MODEL, **body}, headers=reseller.headers, timeout=30
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and "tokenizer" in error["message"]
    assert len(server.asked) == before


def test_a_huge_text_is_refused_by_its_bytes_before_it_is_screened(
    reseller: Deployment, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    screened: list[str] = []

    async def _screen(*_: Any) -> None:
        screened.append("screened")
        raise AssertionError

    monkeypatch.setattr(Moderator, "screen", _screen)
    before = len(server.asked)
    answer = httpx.post(
        f"{reseller.url}/v1/embeddings",
        json={"model": MODEL, "input": ["short", "word " * 200_000]},
        headers=reseller.headers,
        timeout=60,
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), answer.text
    assert "input[1]" in error["message"] and "262144 bytes" in error["message"]
    assert not screened and len(server.asked) == before
