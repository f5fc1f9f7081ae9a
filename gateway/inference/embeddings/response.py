"""/v1/embeddings in OpenAI's format. Only upstream servers compute embeddings."""

import base64
import struct
from collections.abc import Sequence
from typing import Any

from core.errors import InvariantBroken, TollhouseError
from gateway.inference.embeddings.request import ROUTE, parse_embeddings
from gateway.inference.openai_errors import error_object
from gateway.inference.request import InferenceRequest, Usage
from gateway.inference.surface import ResponseInfo, StreamWriter
from gateway.streaming.choices import ChoiceOutput


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


def _encode_vector(vector: str | list[float], form: str) -> str | list[float]:
    """The vector in the requested format, whatever the upstream sent. base64 encodes 32-bit
    little-endian floats."""
    if form == "base64" and not isinstance(vector, str):
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    if form == "float" and isinstance(vector, str):
        raw = base64.b64decode(vector)
        return list(struct.unpack(f"<{len(raw) // 4}f", raw))
    return vector
