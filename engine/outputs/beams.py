"""Beam search over the log-probabilities of next tokens, as vLLM's servers offer it.

The likeliest 2 n continuations of each of n beams are compared; those that end are kept aside, and the n
best of the others go on. A beam's score is its log-probability over its length, the prompt included and
an end token not, to the power of the length penalty.
"""

import math
from dataclasses import dataclass

from engine.protocol import FinishReason, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Beam:
    tokens: tuple[int, ...] = ()  # behind the prompt
    logprob: float = 0.0  # of all of them
    listed: tuple[TokenLogprob, ...] = ()  # of each of them
    ended: bool = False  # by its last token


class BeamSearch:
    """`live` beams wait for `advance`; no runner is needed."""

    def __init__(
        self, prompt_len: int, params: SamplingParams, eos: frozenset[int], most_tokens: int
    ) -> None:
        self.live = [Beam()]
        self.generated = 0  # tokens appended to beams
        self._ended: list[Beam] = []
        self._prompt_len = prompt_len
        self._params = params
        self._stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        self._most_tokens = most_tokens

    @property
    def candidates(self) -> int:
        """How many next tokens of each beam are compared."""
        return 2 * self._params.n

    def advance(self, steps: list[TokenLogprob]) -> None:
        """steps: for each live beam its likeliest next tokens, in `top`."""
        grown: list[Beam] = []
        for beam, step in zip(self.live, steps, strict=True):
            for token, logprob in step.top:
                stops = token in self._stops
                if math.isinf(logprob) or (
                    stops and len(beam.tokens) + 1 < self._params.min_tokens
                ):
                    continue
                listed = TokenLogprob(token, logprob, step.top[: self._params.logprobs or 0])
                following = Beam(
                    (*beam.tokens, token), beam.logprob + logprob, (*beam.listed, listed), stops
                )
                (self._ended if stops else grown).append(following)
                self.generated += stops
        grown.sort(key=self.score, reverse=True)
        self.live = grown[: self._params.n]
        self.generated += len(self.live)

    @property
    def done(self) -> bool:
        """Whether no more step can change what is best."""
        if not self.live or len(self.live[0].tokens) >= self._most_tokens:
            return True
        if len(self._ended) < self._params.n or self._params.length_penalty < 0:
            return False
        worst = sorted(map(self.score, self._ended), reverse=True)[self._params.n - 1]
        longest = (self._prompt_len + self._most_tokens) ** self._params.length_penalty
        return all(beam.logprob / longest <= worst for beam in self.live)

    def best(self) -> list[tuple[Beam, FinishReason]]:
        """The n beams with the highest scores, best first."""
        full = [beam for beam in self.live if len(beam.tokens) >= self._most_tokens]
        ranked = sorted([*self._ended, *full], key=self.score, reverse=True)[: self._params.n]
        return [(beam, FinishReason.STOP if beam.ended else FinishReason.LENGTH) for beam in ranked]

    def score(self, beam: Beam) -> float:
        length = self._prompt_len + len(beam.tokens) - beam.ended
        return float(beam.logprob / length**self._params.length_penalty)
