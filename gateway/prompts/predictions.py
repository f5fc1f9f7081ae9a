"""`prediction` of a chat: a text that the answer will mostly repeat, which the built-in engine guesses
from. It is neither part of the prompt nor charged."""

import asyncio
from typing import Any

from core.errors import BadRequest
from gateway.catalog.codec.tokenizing import INLINE_CHARACTERS, TextCodec

_CHARACTERS = 16  # for each token of the context: what is behind them cannot be guessed from anyway


def text_of(prediction: Any) -> str:
    """Raises BadRequest for anything but OpenAI's `{type: content, content: …}`."""
    content = prediction.get("content") if isinstance(prediction, dict) else None
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        content = "".join(part["text"] for part in content)
    if (
        not isinstance(content, str)
        or prediction.get("type") != "content"
        or set(prediction) != {"type", "content"}
    ):
        raise BadRequest(
            "prediction must have the type content and a content of text, or of parts of type text.",
            next_step="Correct prediction.",
            param="prediction",
            code="invalid_value",
        )
    return content


async def predicted_ids(text: str, codec: TextCodec, context_length: int) -> list[int]:
    """At most as many as the context has."""
    text = text[: _CHARACTERS * context_length]
    if len(text) <= INLINE_CHARACTERS:
        return codec.encode(text)[:context_length]
    return (await asyncio.to_thread(codec.encode, text))[:context_length]
