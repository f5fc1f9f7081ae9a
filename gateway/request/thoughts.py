"""Reasoning of an answer as its provider wants it back: with signatures, or encrypted.

A message of a chat holds it in `reasoning_details`, a list of objects in the form that OpenRouter
introduced: `type` (reasoning.text, reasoning.summary or reasoning.encrypted), the text with its
`signature` or `data`, `format` (who can read it), and `index`, its place among the parts and calls of
the message. It goes back to a provider of the same format untouched, and to no other.
"""

import base64
import binascii
from typing import Any

import orjson

Detail = dict[str, Any]
Annotation = Detail  # OpenAI's object for a citation
ANTHROPIC, GEMINI, OPENAI = "anthropic-claude-v1", "google-gemini-v1", "openai-responses-v1"
FIELD = "reasoning_details"
_PACKED = "th1."  # before reasoning of another API than the one whose field carries it
_LONGEST = 4 << 20  # characters of packed reasoning


def thought(text: str, signature: str, format_: str) -> Detail:
    return {"type": "reasoning.text", "text": text, "signature": signature, "format": format_}


def encrypted(data: str, format_: str, call_id: str | None = None) -> Detail:
    """`call_id`: of the tool call that the provider signed."""
    held = {"type": "reasoning.encrypted", "data": data, "format": format_}
    return {**held, "id": call_id} if call_id else held


def pack(details: list[Detail]) -> str:
    """As one opaque text, for a field that holds a signature or an encrypted item."""
    return _PACKED + base64.urlsafe_b64encode(orjson.dumps(details)).decode()


def unpack(text: str) -> list[Detail] | None:
    """None for a text that `pack` did not write."""
    if not text.startswith(_PACKED) or len(text) > _LONGEST:
        return None
    try:
        details = orjson.loads(base64.urlsafe_b64decode(text[len(_PACKED) :]))
    except (ValueError, binascii.Error):
        return None
    return checked(details)


def checked(details: Any) -> list[Detail]:
    """The objects of the list that are reasoning, with texts as texts; what else is there is of no
    use to a provider."""
    if not isinstance(details, list):
        return []
    return [each for each in details if isinstance(each, dict) and _is_whole(each)]


def indexed(details: list[Detail]) -> list[Detail]:
    """With a place for each that has none: before the rest of its message."""
    return [each if type(each.get("index")) is int else {**each, "index": 0} for each in details]


def _is_whole(detail: Detail) -> bool:
    texts = ("type", "text", "summary", "data", "signature", "format", "id")
    return all(isinstance(detail.get(name), str | None) for name in texts) and str(
        detail.get("type")
    ).startswith("reasoning.")
