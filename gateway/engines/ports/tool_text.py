"""Arguments of tool calls, which some providers send as objects and chats have as text."""

import json
from typing import Any

from gateway.engines.surrogates import whole_texts


def arguments_text(given: Any) -> str:
    """Raises TypeError for anything but an object, or none."""
    if given is None:
        return "{}"
    if isinstance(given, str):
        return "{}" if given.strip() in ("", "null") else given
    if not isinstance(given, dict):
        raise TypeError(f"the arguments of a tool call are {type(given).__name__}")
    return json.dumps(whole_texts(given), ensure_ascii=False, separators=(",", ":"))
