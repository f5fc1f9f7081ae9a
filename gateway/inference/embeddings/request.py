"""The body of /v1/embeddings and its conversion to an `InferenceRequest`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from core.errors import BadRequest
from gateway.inference.decoding import Request, check_label, decode
from gateway.inference.request import InferenceRequest
from gateway.inference.sampling import Positive

ROUTE = "/v1/embeddings"
_MAX_INPUTS = 2048  # inputs per request, as in OpenAI's API


class EmbeddingsBody(Request, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=300)]
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    user: str | None = None


_decoder = msgspec.json.Decoder(EmbeddingsBody)


def parse_embeddings(raw: bytes) -> InferenceRequest:
    body = decode(_decoder, raw)
    form = body.encoding_format or "float"
    requested: dict[str, Any] = {"encoding_format": form}
    if body.dimensions is not None:
        requested["dimensions"] = body.dimensions
    return InferenceRequest(
        route=ROUTE,
        model=body.model,
        inputs=_inputs(body.input),
        max_tokens=1,
        engine_parameters={"embeddings": True},
        end_user=check_label("user", body.user),
        extra={"embeddings": requested},
    )


def _inputs(given: str | list[Any]) -> Any:
    """Accepts a string, token ids, or a list of either; none of them empty."""
    if isinstance(given, str) or (given and all(_is_token(each) for each in given)):
        given = [given]
    alike = all(isinstance(each, str) for each in given) or all(
        isinstance(each, list) and all(_is_token(token) for token in each) for each in given
    )
    if not alike or not 0 < len(given) <= _MAX_INPUTS or not all(given):
        raise BadRequest(
            f"input must be 1 to {_MAX_INPUTS} strings, or 1 to {_MAX_INPUTS} lists of token ids, "
            "none of them empty.",
            next_step="Correct input.",
            param="input",
            code="invalid_value",
        )
    return given


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31
