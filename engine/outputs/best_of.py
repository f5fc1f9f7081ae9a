"""`best_of`: more choices are sampled than are delivered, and the likeliest ones are."""

from dataclasses import replace

from engine.protocol import FinishReason, SamplingParams, TokenChunk
from engine.scheduling.sequence import Request

_DELIVERED = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.DEADLINE)


def as_sampled(request: Request) -> Request:
    """The request with all its candidates as choices, whose log-probabilities rank them."""
    asked = request.inputs.sampling
    if asked.best_of > asked.n:
        sampled = replace(asked, n=asked.best_of, logprobs=asked.logprobs or 0)
        request.inputs, request.asked = replace(request.inputs, sampling=sampled), asked
    return request


def best_choices(
    held: list[TokenChunk], asked: SamplingParams, ended: FinishReason | None
) -> list[TokenChunk]:
    """One chunk for each of the `asked.n` candidates with the highest log-probability per token, of
    equal ones the earlier; without tokens where the request was aborted or failed. held: all chunks of
    all candidates, in order."""
    candidates: dict[int, list[TokenChunk]] = {}
    for chunk in held:
        candidates.setdefault(chunk.choice, []).append(chunk)
    whole = [_joined(chunks) for _, chunks in sorted(candidates.items())]
    scores = next((each.prompt_logprobs for each in held if each.prompt_logprobs), None)
    whole.sort(key=_mean_logprob, reverse=True)
    best = []
    for choice, chunk in enumerate(whole[: asked.n]):
        delivered = ended in _DELIVERED
        best.append(
            replace(
                chunk,
                choice=choice,
                tokens=chunk.tokens if delivered else [],
                logprobs=None if asked.logprobs is None or not delivered else chunk.logprobs,
                prompt_logprobs=None if choice or not delivered else scores,
            )
        )
    return best


def _joined(chunks: list[TokenChunk]) -> TokenChunk:
    return replace(
        chunks[-1],
        tokens=[token for chunk in chunks for token in chunk.tokens],
        logprobs=[each for chunk in chunks for each in chunk.logprobs or ()],
    )


def _mean_logprob(chunk: TokenChunk) -> float:
    listed = chunk.logprobs or ()
    return sum(each.logprob for each in listed) / len(listed) if listed else float("-inf")
