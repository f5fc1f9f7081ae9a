"""/v1/rerank and /v1/score: their bodies, and their answers."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from core.errors import BadRequest, InvariantBroken, TollhouseError
from gateway.answers.choices import ChoiceOutput
from gateway.answers.surface import ResponseInfo, StreamWriter
from gateway.edge.api_errors import error_object
from gateway.edge.decoding import Request, check_label, decode
from gateway.formats.embeddings import MAX_INPUTS, Truncation, truncation_of
from gateway.formats.sampling import Positive
from gateway.request.inference import RERANK_ROUTE, SCORE_ROUTE, InferenceRequest, Usage

Text = Annotated[str, Meta(min_length=1)]


class TextDocument(Request):
    text: Text


class RerankBody(Request, kw_only=True):
    """In the format of Jina's and Cohere's API, as vLLM serves it."""

    model: Annotated[str, Meta(min_length=1, max_length=300)]
    query: Text
    documents: Annotated[list[Text | TextDocument], Meta(min_length=1)]
    top_n: Positive | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    user: str | None = None


class ScoreBody(Request, kw_only=True):
    """In the format of vLLM's API."""

    model: Annotated[str, Meta(min_length=1, max_length=300)]
    text_1: Text | Annotated[list[Text], Meta(min_length=1)]
    text_2: Text | Annotated[list[Text], Meta(min_length=1)]
    encoding_format: str | None = None  # sent by clients of vLLM, where it says nothing
    truncate_prompt_tokens: Truncation | None = None
    user: str | None = None


_rerank = msgspec.json.Decoder(RerankBody)
_score = msgspec.json.Decoder(ScoreBody)


def parse_rerank(raw: bytes) -> InferenceRequest:
    body = decode(_rerank, raw)
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    shown = documents if body.return_documents is not False else None
    extra = {"documents": shown, "top_n": body.top_n or len(documents)}
    return _request(RERANK_ROUTE, body, [body.query], documents, extra)


def parse_score(raw: bytes) -> InferenceRequest:
    body = decode(_score, raw)
    first, second = _listed(body.text_1), _listed(body.text_2)
    if len(first) not in (1, len(second)):
        raise BadRequest(
            f"text_1 has {len(first)} texts and text_2 {len(second)}.",
            next_step="Send one text_1 for all texts of text_2, or as many of one as of the other.",
            param="text_1",
            code="invalid_value",
        )
    return _request(SCORE_ROUTE, body, first, second, {})


def _request(
    route: str,
    body: RerankBody | ScoreBody,
    queries: list[str],
    documents: list[str],
    extra: dict[str, Any],
) -> InferenceRequest:
    if len(queries) + len(documents) > MAX_INPUTS:
        param = "documents" if route == RERANK_ROUTE else "text_2"
        raise BadRequest(
            f"The request has {len(queries) + len(documents)} texts; at most {MAX_INPUTS} are taken.",
            next_step="Send fewer texts per request.",
            param=param,
            code="invalid_value",
        )
    return InferenceRequest(
        route=route,
        model=body.model,
        inputs=[*queries, *documents],
        max_tokens=1,
        engine_parameters={route.rpartition("/")[2]: True},
        truncate_prompt_tokens=truncation_of(body.truncate_prompt_tokens),
        end_user=check_label("user", body.user),
        extra={"queries": len(queries), **extra},
    )


def _listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


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
