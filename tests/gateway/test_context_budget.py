"""A request over the context is refused with the numbers, or shortened only where it was allowed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ContextLengthExceeded
from gateway.context_budget import Truncation, fit

DISABLED, OLDEST, RANKED = Truncation.DISABLED, Truncation.OLDEST, Truncation.RANKED


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
    assert fit(CHAT, count(CHAT), count, DISABLED) is CHAT


def test_by_default_it_is_refused_with_the_numbers() -> None:
    with pytest.raises(ContextLengthExceeded, match=rf"{count(CHAT)} tokens and at most 12"):
        fit(CHAT, 12, count, DISABLED)


def test_the_oldest_turns_go_first_and_instructions_stay() -> None:
    kept = fit(CHAT, count(CHAT) - 1, count, OLDEST)
    assert [message["content"] for message in kept] == [
        "be kind",
        "be brief",
        "five six",
        "seven",
        "eight",
    ]


@given(st.integers(0, 30))
def test_it_drops_no_more_than_it_must(limit: int) -> None:
    try:
        kept = fit(CHAT, limit, count, OLDEST)
    except ContextLengthExceeded:
        assert limit < count([CHAT[0], CHAT[3], CHAT[6]])
        return
    assert count(kept) <= limit
    assert kept[-1] == CHAT[-1]
    if len(kept) < len(CHAT):
        assert count(fit(CHAT, limit + 30, count, OLDEST)) > limit


def test_the_worst_ranked_blocks_go_first() -> None:
    parts: list[dict[str, Any]] = [
        {"text": "a a a", "rank": 2},
        {"text": "b b", "rank": 1},
        {"text": "c c c c", "rank": 3},
        {"text": "why?"},
    ]
    chat = [{"role": "user", "content": parts}]
    assert fit(chat, 7, count, RANKED)[0]["content"] == [parts[0], parts[1], parts[3]]
    assert fit(chat, 2, count, RANKED)[0]["content"] == [parts[3]]
    with pytest.raises(ContextLengthExceeded, match="2 tokens and at most 1"):
        fit(chat, 1, count, RANKED)
