"""Log-probabilities of prompt tokens in vLLM's format."""

from collections.abc import Sequence
from typing import Any

from engine.protocol import PromptLogprob
from gateway.catalog.codec.tokenizing import TextCodec


def prompt_logprobs_object(
    scores: Sequence[PromptLogprob], alternatives: int, codec: TextCodec | None
) -> list[dict[str, Any] | None]:
    """By token id: the best ones, and the prompt's own. The first token has no entry."""
    return [
        None if each.logprob is None else _entry(each, each.logprob, alternatives, codec)
        for each in scores
    ]


def _entry(
    score: PromptLogprob, logprob: float, alternatives: int, codec: TextCodec | None
) -> dict[str, Any]:
    listed = [(token, value, n) for n, (token, value) in enumerate(score.top[:alternatives], 1)]
    return {
        str(token): {
            "logprob": value,
            "rank": rank,
            "decoded_token": codec.token_text(token) if codec else "",
        }
        for token, value, rank in (*listed, (score.token, logprob, score.rank))
    }
