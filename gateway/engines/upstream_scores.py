"""/v1/rerank and /v1/score of an upstream that declares them: its body, and the scores of its answer."""

import math
from typing import Any

import msgspec

from gateway.request.inference import RERANK_ROUTE, SCORE_ROUTE, InferenceRequest

ROUTES = (RERANK_ROUTE, SCORE_ROUTE)


class _Row(msgspec.Struct):
    index: int
    relevance_score: float | None = None  # of rerank
    score: float | None = None


class _Answer(msgspec.Struct):
    results: list[_Row] = []
    data: list[_Row] = []
    usage: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Answer)


def scores_body(request: InferenceRequest, model: str) -> dict[str, Any]:
    """All documents are asked for, since the gateway cuts its answer to `top_n` itself."""
    texts, queries = request.inputs or [], request.extra["queries"]
    first, second = texts[:queries], texts[queries:]
    body: dict[str, Any] = {"model": model}
    if request.route == RERANK_ROUTE:
        body |= {"query": first[0], "documents": second}
    else:
        body |= {"text_1": first[0] if queries == 1 else first, "text_2": second}
    if request.truncate_prompt_tokens is not None:
        body["truncate_prompt_tokens"] = request.truncate_prompt_tokens
    return body


def scores_of(raw: bytes, request: InferenceRequest) -> tuple[list[float], dict[str, Any] | None]:
    """The scores in the documents' order, and the usage. Raises ValueError, or msgspec's, for an
    answer that does not have a number for each document."""
    answer = _decoder.decode(raw)
    expected = len(request.inputs or ()) - request.extra["queries"]
    found: dict[int, float] = {}
    for row in answer.results or answer.data:
        score = row.score if row.relevance_score is None else row.relevance_score
        if score is not None and math.isfinite(score):
            found[row.index] = score
    if sorted(found) != list(range(expected)):
        raise ValueError(f"{len(found)} scores for {expected} documents")
    usage = answer.usage
    if usage is not None and "prompt_tokens" not in usage:
        usage["prompt_tokens"] = usage.get("total_tokens")  # rerank's usage has the total alone
    return [found[index] for index in range(expected)], usage
