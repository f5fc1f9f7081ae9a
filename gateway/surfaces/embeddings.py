"""/v1/embeddings in OpenAI's format. Only upstream servers compute embeddings."""

import base64
import struct
from collections.abc import Sequence
from typing import Any

from core.errors import InvariantBroken, TollhouseError
from gateway.ask import Ask, Usage
from gateway.schemas.embeddings import ROUTE, parse_embeddings
from gateway.streaming.choices import ChoiceOutput
from gateway.surface import Head, StreamWriter
from gateway.surfaces.openai_errors import error_object


class EmbeddingsSurface:
    route = ROUTE
    style = "openai"

    def parse(self, raw: bytes) -> Ask:
        return parse_embeddings(raw)

    def stream(self, head: Head, ask: Ask) -> StreamWriter:
        raise InvariantBroken("Embeddings are not streamed; EmbeddingsBody has no stream field.")

    def answer(
        self, head: Head, ask: Ask, choices: Sequence[ChoiceOutput], usage: Usage
    ) -> dict[str, Any]:
        form = ask.extra["embeddings"]["encoding_format"]
        return {
            "object": "list",
            "model": head.model,
            "data": [
                {"object": "embedding", "index": index, "embedding": _in_form(vector, form)}
                for index, vector in enumerate(choices[0].vectors)
            ],
            "usage": {"prompt_tokens": usage.prompt, "total_tokens": usage.total},
        }

    def error(self, error: TollhouseError, request_id: str) -> dict[str, Any]:
        return error_object(error)


def _in_form(vector: str | list[float], form: str) -> str | list[float]:
    """The vector in the requested format, whatever the upstream sent. base64 encodes 32-bit
    little-endian floats."""
    if form == "base64" and not isinstance(vector, str):
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    if form == "float" and isinstance(vector, str):
        raw = base64.b64decode(vector)
        return list(struct.unpack(f"<{len(raw) // 4}f", raw))
    return vector
