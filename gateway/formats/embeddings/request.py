"""The body of /v1/embeddings and its conversion to an `InferenceRequest`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from core.errors import BadRequest
from gateway.edge.decoding import Request, check_label, decode
from gateway.formats.sampling import Positive
from gateway.request.inference import InferenceRequest

ROUTE = "/v1/embeddings"
MAX_INPUTS = 2048  # inputs per request, as in OpenAI's API
Truncation = Annotated[int, Meta(ge=-1)]


class EmbeddingsBody(Request, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=300)]
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    user: str | None = None
    # Of the built-in engine:
    pooling: Literal["last", "mean", "cls"] | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: Truncation | None = None


_decoder = msgspec.json.Decoder(EmbeddingsBody)


def parse_embeddings(raw: bytes) -> InferenceRequest:
    body = decode(_decoder, raw)
    form = body.encoding_format or "float"
    requested: dict[str, Any] = {"encoding_format": form}
    if body.dimensions is not None:
        requested["dimensions"] = body.dimensions
    own = {"pooling": body.pooling, "normalize": body.normalize}
    return InferenceRequest(
        route=ROUTE,
        model=body.model,
        inputs=_inputs(body.input),
        max_tokens=1,
        engine_parameters={"embeddings": True},
        truncate_prompt_tokens=truncation_of(body.truncate_prompt_tokens),
        end_user=check_label("user", body.user),
        extra={
            "embeddings": requested,
            "own_engine": {name: value for name, value in own.items() if value is not None},
        },
    )


def truncation_of(given: int | None) -> int | None:
    """`truncate_prompt_tokens` of a request whose texts are pooled; -1 is the whole context."""
    if given == 0:
        raise BadRequest(
            "truncate_prompt_tokens is 0: no token would be left.",
            next_step="Set it to at least 1, or to -1 for the model's context.",
            param="truncate_prompt_tokens",
            code="invalid_value",
        )
    return given


def _inputs(given: str | list[Any]) -> Any:
    """Accepts a string, token ids, or a list of either; none of them empty."""
    if isinstance(given, str) or (given and all(_is_token(each) for each in given)):
        given = [given]
    alike = all(isinstance(each, str) for each in given) or all(
        isinstance(each, list) and all(_is_token(token) for token in each) for each in given
    )
    if not alike or not 0 < len(given) <= MAX_INPUTS or not all(given):
        raise BadRequest(
            f"input must be 1 to {MAX_INPUTS} strings, or 1 to {MAX_INPUTS} lists of token ids, "
            "none of them empty.",
            next_step="Correct input.",
            param="input",
            code="invalid_value",
        )
    return given


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31
