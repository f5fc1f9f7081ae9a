"""A request over the context is refused with the numbers, or shortened only where it was allowed."""

import time
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ContextLengthExceeded
from engine.demo.paths import MODEL_DIR
from gateway.catalog.codec.tokenizing import load_codec
from gateway.prompts.context_budget import Count, Truncation, fit
from tests.gateway.deployment import MODEL, Deployment

DISABLED, AUTO = Truncation.DISABLED, Truncation.AUTO
OLDEST, RANKED = Truncation.OLDEST, Truncation.RANKED


def count(messages: list[dict[str, Any]]) -> int:
    total = 0
    for message in messages:
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        total += 1 + sum(len(text.split()) for text in texts)
    return total


CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "one two three"},
    {"role": "assistant", "content": "four"},
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "five six"},
    {"role": "assistant", "content": "seven"},
    {"role": "user", "content": "eight"},
]


def test_what_fits_is_not_touched() -> None:
    assert fit(CHAT, count(CHAT), count, DISABLED).messages is CHAT


def test_by_default_it_is_refused_with_the_numbers() -> None:
    with pytest.raises(ContextLengthExceeded, match=rf"{count(CHAT)} tokens; at most 12"):
        fit(CHAT, 12, count, DISABLED)


def test_the_oldest_turns_go_first_and_instructions_stay() -> None:
    fitted = fit(CHAT, count(CHAT) - 1, count, OLDEST)
    kept = fitted.messages
    assert fitted.effect == "turns=1"
    assert [message["content"] for message in kept] == [
        "be kind",
        "be brief",
        "five six",
        "seven",
        "eight",
    ]


@given(st.integers(0, 30), st.sampled_from([None, count, lambda _m: 0, lambda m: 9 * len(m)]))
def test_it_drops_no_more_than_it_must(limit: int, rough: Count | None) -> None:
    try:
        kept = fit(CHAT, limit, count, OLDEST, rough).messages
    except ContextLengthExceeded:
        assert limit < count([CHAT[0], CHAT[3], CHAT[6]])
        return
    assert count(kept) <= limit
    assert kept[-1] == CHAT[-1]
    one_more = next((n for n in (7, 4, 3) if n > len(kept)), None)
    if one_more is not None:
        longer = {7: CHAT, 4: [CHAT[0], *CHAT[3:]], 3: [CHAT[0], CHAT[3], CHAT[6]]}[one_more]
        assert len(longer) > len(kept) and count(longer) > limit


def test_the_worst_ranked_blocks_go_first() -> None:
    parts: list[dict[str, Any]] = [
        {"text": "a a a", "rank": 2},
        {"text": "b b", "rank": 1},
        {"text": "c c c c", "rank": 3},
        {"text": "why?"},
    ]
    chat = [{"role": "user", "content": parts}]
    assert fit(chat, 7, count, RANKED).messages[0]["content"] == [parts[0], parts[1], parts[3]]
    assert fit(chat, 2, count, RANKED).messages[0]["content"] == [parts[3]]
    with pytest.raises(ContextLengthExceeded, match="2 tokens; at most 1"):
        fit(chat, 1, count, RANKED)


def test_auto_drops_blocks_and_then_turns() -> None:
    parts = [{"text": "a a a", "rank": 2}, {"text": "b b", "rank": 1}, {"text": "why?"}]
    chat = [*CHAT[:3], {"role": "user", "content": parts}]
    assert fit(chat, count(chat) - 1, count, AUTO).effect == "blocks=1"
    fitted = fit(chat, 5, count, AUTO)
    assert fitted.effect == "turns=1, blocks=2"
    assert fitted.messages == [CHAT[0], {"role": "user", "content": [{"text": "why?"}]}]


def turns(number: int, words: int = 12) -> list[dict[str, Any]]:
    said = [("user", "assistant")[i % 2] for i in range(number)]
    return [{"role": role, "content": f"{i} " + "word " * words} for i, role in enumerate(said)]


def post(deployment: Deployment, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{deployment.url}/v1/chat/completions",
        json={"model": MODEL, "max_tokens": 4, **body},
        headers=deployment.headers,
        timeout=30,
    )


def test_over_http_the_default_refuses_with_the_numbers(deployment: Deployment) -> None:
    answer = post(deployment, messages=turns(101))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert "context is 512 tokens" in error["message"] and error["param"] == "messages"


@pytest.mark.parametrize("way", ["auto", "oldest"])
def test_over_http_the_oldest_turns_go_and_the_event_says_so(
    deployment: Deployment, way: str
) -> None:
    answer = post(deployment, messages=turns(101), truncation=way)
    assert answer.status_code == 200, answer.text
    effect = answer.headers["x-tollhouse-truncation"]
    assert effect.startswith("turns=") and deployment.last_event()["truncated"] == effect
    prompt = deployment.engine.submitted[-1].prompt
    assert 400 < len(prompt) <= 508
    assert answer.json()["usage"]["prompt_tokens"] == len(prompt)
    text = load_codec(MODEL_DIR).decode(prompt)
    assert "100 word" in text and "\n0 word" not in text


def test_over_http_the_worst_blocks_go(deployment: Deployment) -> None:
    parts = [{"type": "text", "text": f"block{i} " * 30, "rank": i} for i in range(1, 12)]
    body = [{"role": "user", "content": [*parts, {"type": "text", "text": "why?"}]}]
    answer = post(deployment, messages=body, truncation="ranked")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tollhouse-truncation"].startswith("blocks=")
    text = load_codec(MODEL_DIR).decode(deployment.engine.submitted[-1].prompt)
    assert "block1 " in text and "why?" in text and "block11" not in text


def test_what_fits_says_nothing_and_what_cannot_fit_is_refused(deployment: Deployment) -> None:
    kept = post(deployment, messages=turns(3), truncation="auto")
    assert kept.status_code == 200 and "x-tollhouse-truncation" not in kept.headers
    lost = post(deployment, messages=turns(1, words=2000), truncation="auto")
    assert lost.status_code == 400 and lost.json()["error"]["code"] == "context_length_exceeded"


def test_ten_thousand_turns_are_cut_in_little_time(deployment: Deployment) -> None:
    began = time.monotonic()
    assert post(deployment, messages=turns(9_999, words=6), truncation="auto").status_code == 200
    assert time.monotonic() - began < 20
