"""/v1/embeddings: its body, and its answer."""

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from core.errors import BadRequest, InvariantBroken, TollhouseError
from gateway.answers.choices import ChoiceOutput
from gateway.answers.surface import ResponseInfo, StreamWriter
from gateway.edge.api_errors import error_object
from gateway.edge.decoding import Request, check_label, decode
from gateway.formats.sampling import Positive
from gateway.request.inference import InferenceRequest, Usage

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


_LEAST_WIDE = 8 * 16  # bytes of a vector in which 64-bit floats can be recognised
_LARGEST = 1e6  # of an embedding's numbers


class EmbeddingsSurface:
    route = ROUTE
    style = "openai"

    def parse(self, raw: bytes) -> InferenceRequest:
        return parse_embeddings(raw)

    def stream(self, info: ResponseInfo, request: InferenceRequest) -> StreamWriter:
        raise InvariantBroken("Embeddings are not streamed; EmbeddingsBody has no stream field.")

    def answer(
        self,
        info: ResponseInfo,
        request: InferenceRequest,
        choices: Sequence[ChoiceOutput],
        usage: Usage,
    ) -> dict[str, Any]:
        form = request.extra["embeddings"]["encoding_format"]
        return {
            "object": "list",
            "model": info.model,
            "data": [
                {"object": "embedding", "index": index, "embedding": _encode_vector(vector, form)}
                for index, vector in enumerate(choices[0].vectors)
            ],
            "usage": {"prompt_tokens": usage.prompt, "total_tokens": usage.total},
        }

    def error(self, error: TollhouseError, request_id: str) -> dict[str, Any]:
        return error_object(error)


def _encode_vector(vector: bytes, form: str) -> Any:
    """The vector in the requested format, whatever the upstream sent: JSON, a list of numbers or
    base64, which encodes 32-bit little-endian floats; some servers encode 64-bit ones."""
    encoded = vector.startswith(b'"')
    if not encoded and form == "float":
        return orjson.Fragment(vector)
    given = orjson.loads(vector)
    if not encoded:
        return base64.b64encode(struct.pack(f"<{len(given)}f", *given)).decode()
    raw = base64.b64decode(given)
    wide = _wide(raw)
    if form == "base64":
        if wide is None:
            return orjson.Fragment(vector)
        return base64.b64encode(struct.pack(f"<{len(wide)}f", *wide)).decode()
    return list(struct.unpack(f"<{len(raw) // 4}f", raw)) if wide is None else wide


def _wide(raw: bytes) -> list[float] | None:
    """The numbers of a vector of 64-bit floats; None for one of 32-bit floats. The lower halves of
    64-bit floats, read as 32-bit ones, have any exponent; those of an embedding are small."""
    if len(raw) % 8 or len(raw) < _LEAST_WIDE:
        return None
    narrow = struct.unpack(f"<{len(raw) // 4}f", raw)
    if all(abs(each) < _LARGEST for each in narrow[::2]):  # also false for NaN
        return None
    wide = struct.unpack(f"<{len(raw) // 8}d", raw)
    return list(wide) if all(abs(each) < _LARGEST for each in wide) else None
