"""The bodies of /v1/rerank and /v1/score and their conversion to an `InferenceRequest`.

Its `inputs` are the queries and then the documents. `extra["queries"]` is the number of queries; one
query is compared with every document, several with one document each.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from core.errors import BadRequest
from gateway.edge.decoding import Request, check_label, decode
from gateway.formats.embeddings.request import MAX_INPUTS, Truncation, truncation_of
from gateway.formats.sampling import Positive
from gateway.request.inference import InferenceRequest
from gateway.request.routes import RERANK_ROUTE, SCORE_ROUTE

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
