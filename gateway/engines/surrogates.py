"""Halves of UTF-16 surrogate pairs in texts that a server has escaped and cut between them."""

import re
from collections.abc import Hashable
from typing import Any

_HALF = re.compile("[\ud800-\udfff]")


class SplitPairs:
    """Joins the halves that arrive in different pieces of one text; a half alone becomes U+FFFD."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, str] = {}  # the first half at the end of a text, by its name

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def join(self, name: Hashable, piece: str, *, last: bool) -> str:
        """The part of the text that is complete; `last` at its end."""
        text = self._waiting.pop(name, "") + piece
        if not last and text and "\ud800" <= text[-1] <= "\udbff":
            self._waiting[name], text = text[-1], text[:-1]
        return whole_text(text)


def whole_text(text: str) -> str:
    if _HALF.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def whole_texts(value: Any) -> Any:
    """The same JSON value without halves in any of its strings."""
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, list):
        return [whole_texts(each) for each in value]
    if isinstance(value, dict):
        return {whole_texts(name): whole_texts(each) for name, each in value.items()}
    return value
