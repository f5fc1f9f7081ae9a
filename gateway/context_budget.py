"""Fits a conversation into the context: refuses with the numbers, or drops what the client agreed to.

`oldest` drops whole turns (a user message and what answered it) from the front, never the last one.
`ranked` drops content parts that carry a `rank` (1 is the best), the worst first.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from core.errors import ContextLengthExceeded

Message = dict[str, Any]
Count = Callable[[list[Message]], int]


class Truncation(StrEnum):
    DISABLED = "disabled"
    OLDEST = "oldest"
    RANKED = "ranked"


def fit(messages: list[Message], limit: int, count: Count, truncation: Truncation) -> list[Message]:
    """`count` gives the prompt's tokens, `limit` is what the prompt may take. Raises when nothing
    that may be dropped makes it fit."""
    needed = count(messages)
    if needed <= limit:
        return messages
    if truncation is Truncation.DISABLED:
        raise too_long(needed, limit)
    drop = _drop_turns if truncation is Truncation.OLDEST else _drop_parts
    most = len(_turns(messages)) - 1 if truncation is Truncation.OLDEST else len(_ranked(messages))
    least = _fewest(most, lambda number: count(drop(messages, number)) <= limit)
    if least is None:
        raise too_long(count(drop(messages, max(most, 0))), limit)
    return drop(messages, least)


def too_long(needed: int, limit: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"The prompt has {needed} tokens and at most {limit} fit.",
        next_step="Shorten it, lower max_tokens, or set truncation to oldest or ranked.",
        param="messages",
    )


def _fewest(most: int, fits: Callable[[int], bool]) -> int | None:
    """The least number of drops that fits; dropping more never makes a prompt longer."""
    if most < 1 or not fits(most):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _turns(messages: Sequence[Message]) -> list[int]:
    """Where each turn begins: the user messages after the leading system ones."""
    return [index for index, message in enumerate(messages) if message.get("role") == "user"]


def _drop_turns(messages: list[Message], number: int) -> list[Message]:
    starts = _turns(messages)
    if not starts or number < 1:
        return messages
    dropped = range(starts[0], starts[number])
    return [
        message
        for index, message in enumerate(messages)
        # A system message in mid-conversation is an instruction, not a turn: it stays.
        if index not in dropped or message.get("role") in ("system", "developer")
    ]


def _ranked(messages: Sequence[Message]) -> list[tuple[int, int, int]]:
    """(rank, message, part) of every ranked part, the worst rank first, later ones before earlier."""
    found = [
        (part["rank"], i, j)
        for i, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for j, part in enumerate(message["content"])
        if isinstance(part, Mapping) and type(part.get("rank")) is int
    ]
    return sorted(found, reverse=True)


def _drop_parts(messages: list[Message], number: int) -> list[Message]:
    gone = {(i, j) for _rank, i, j in _ranked(messages)[:number]}
    return [
        {**message, "content": [p for j, p in enumerate(message["content"]) if (i, j) not in gone]}
        if isinstance(message.get("content"), list)
        else message
        for i, message in enumerate(messages)
    ]
