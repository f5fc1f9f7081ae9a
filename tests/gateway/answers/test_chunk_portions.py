"""What one turn of the event loop takes: by work, in order, at least one chunk, and never a token more
than the money covers."""

from typing import Any

import pytest

from engine.protocol import FinishReason, PromptLogprob, TokenChunk, TokenLogprob
from gateway.answers.chunks import is_large, portions, take_tokens, tokens_of
from gateway.request.engine import Chunk, TextChunk


def text(size: int, **fields: Any) -> TextChunk:
    return TextChunk("req_1", 0, "x" * size, 1, **fields)


def tokens(count: int, **fields: Any) -> TokenChunk:
    return TokenChunk("req_1", 0, list(range(count)), **fields)


def sizes(chunks: list[Chunk]) -> list[int]:
    """How many chunks each portion has."""
    found = list(portions(chunks))
    assert [each for portion in found for each in portion] == chunks
    return [len(portion) for portion in found]


TOP = tuple((token, -1.0) for token in range(20))


def listed(alternatives: int) -> TokenLogprob:
    return TokenLogprob(1, -1.0, TOP[:alternatives])


@pytest.mark.parametrize(
    ("chunks", "portioned"),
    [
        ([text(600), text(400)], [2]),
        ([text(600), text(401)], [1, 1]),
        ([text(5_000), text(5_000)], [1, 1]),
        ([text(1), text(5_000), text(1)], [1, 1, 1]),
        ([text(500)] * 5, [2, 2, 1]),
        ([tokens(1)] * 120, [50, 50, 20]),  # a token is as much work as 20 characters
        ([tokens(25), tokens(25), tokens(1)], [2, 1]),
        # Each alternative is as much work as a token; its token's own entry is one more.
        ([tokens(1, logprobs=[listed(20)])] * 5, [2, 2, 1]),
        ([tokens(1, logprobs=[listed(0)])] * 50, [25, 25]),
        ([tokens(1, prompt_logprobs=[PromptLogprob(1, -1.0, 1, TOP)] * 2), tokens(9)], [1, 1]),
        ([text(0, logprobs={"content": [{"top_logprobs": [{}] * 20}]})] * 5, [2, 2, 1]),
        ([], []),
    ],
)
def test_a_portion_holds_a_thousand_characters_of_work(
    chunks: list[Chunk], portioned: list[int]
) -> None:
    assert sizes(chunks) == portioned


LISTED = {"content": [{"token": "x"}] * 50}


@pytest.mark.parametrize(
    ("run", "waiting", "large"),
    [
        ([text(1_000)], 4_000, False),
        ([text(1_001)], 0, True),
        ([text(600), text(401)], 0, True),
        ([text(1)], 4_001, True),
        ([text(0, logprobs=LISTED)], 0, False),
        ([text(1, logprobs=LISTED)], 0, True),
        ([tokens(50)], 0, False),
        ([tokens(51)], 0, True),
        ([tokens(0, prompt_logprobs=[PromptLogprob(7)] * 50)], 0, False),
        ([tokens(1, prompt_logprobs=[PromptLogprob(7)] * 50)], 0, True),
    ],
)
def test_what_takes_longer_than_a_portion_belongs_in_a_thread(
    run: list[Chunk], waiting: int, large: bool
) -> None:
    assert is_large(run, waiting) is large


def logprobs(count: int) -> list[TokenLogprob]:
    return [TokenLogprob(token, -1.0) for token in range(count)]


def test_tokens_past_the_money_are_cut_off_with_their_logprobs() -> None:
    last = tokens(5, logprobs=logprobs(5), finish_reason=FinishReason.STOP)
    assert take_tokens([tokens(2), last], 7) == [tokens(2), last]
    assert take_tokens([tokens(2), last], 5) == [tokens(2), tokens(3, logprobs=logprobs(3))]
    assert take_tokens([tokens(2), last], 2) == [tokens(2)]
    assert take_tokens([tokens(2), tokens(3)], 1) == [tokens(1)]
    assert take_tokens([tokens(2)], 0) == []


def test_a_text_is_whole_or_absent_and_counts_as_it_says() -> None:
    said: list[Chunk] = [TextChunk("req_1", 0, "a b", 2), TextChunk("req_1", 0, "c d e", 3)]
    chunks: list[Chunk] = [*said, tokens(4)]
    assert [tokens_of(each) for each in chunks] == [2, 3, 4]
    assert take_tokens(said, 5) == said
    assert take_tokens(said, 4) == said[:1]
    assert take_tokens(said, 1) == []
