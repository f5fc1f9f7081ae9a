"""/v1/embeddings in OpenAI's format."""

import base64
import struct
from collections.abc import Sequence
from typing import Any

import orjson

from core.errors import InvariantBroken, TollhouseError
from gateway.answers.choices import ChoiceOutput
from gateway.answers.surface import ResponseInfo, StreamWriter
from gateway.edge.openai_errors import error_object
from gateway.formats.embeddings.request import ROUTE, parse_embeddings
from gateway.request.inference import InferenceRequest, Usage

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
