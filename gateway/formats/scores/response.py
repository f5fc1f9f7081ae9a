"""/v1/rerank in Jina's format and /v1/score in vLLM's."""

from collections.abc import Sequence
from typing import Any

from core.errors import InvariantBroken, TollhouseError
from gateway.answers.choices import ChoiceOutput
from gateway.answers.surface import ResponseInfo, StreamWriter
from gateway.edge.openai_errors import error_object
from gateway.formats.scores.request import parse_rerank, parse_score
from gateway.request.inference import InferenceRequest, Usage
from gateway.request.routes import RERANK_ROUTE, SCORE_ROUTE


class ScoreSurface:
    route = SCORE_ROUTE
    style = "openai"

    def parse(self, raw: bytes) -> InferenceRequest:
        return parse_score(raw)

    def stream(self, info: ResponseInfo, request: InferenceRequest) -> StreamWriter:
        raise InvariantBroken("Scores are not streamed; the body has no stream field.")

    def answer(
        self,
        info: ResponseInfo,
        request: InferenceRequest,
        choices: Sequence[ChoiceOutput],
        usage: Usage,
    ) -> dict[str, Any]:
        return {
            "id": info.request_id,
            "object": "list",
            "created": info.created,
            "model": info.model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(choices[0].scores)
            ],
            "usage": _usage(usage),
        }

    def error(self, error: TollhouseError, request_id: str) -> dict[str, Any]:
        return error_object(error)


class RerankSurface(ScoreSurface):
    route = RERANK_ROUTE

    def parse(self, raw: bytes) -> InferenceRequest:
        return parse_rerank(raw)

    def answer(
        self,
        info: ResponseInfo,
        request: InferenceRequest,
        choices: Sequence[ChoiceOutput],
        usage: Usage,
    ) -> dict[str, Any]:
        """The best documents first; of equal ones the one that was sent first."""
        scores, documents = choices[0].scores, request.extra["documents"]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": documents[index]}} if documents is not None else {})
            for index in order[: request.extra["top_n"]]
        ]
        return {
            "id": info.request_id,
            "model": info.model,
            "usage": _usage(usage),
            "results": results,
        }


def _usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt, "total_tokens": usage.total}
