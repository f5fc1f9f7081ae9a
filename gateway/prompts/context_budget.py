"""Fits a conversation into the context: refuses it, or drops what the truncation mode allows.

`oldest` drops whole turns (a user message and its replies) from the front, never the last one.
`ranked` drops content parts that carry a `rank` (1 is the best), the worst first.
`auto` drops ranked parts first, then turns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from core.errors import ContextLengthExceeded

Message = dict[str, Any]
Count = Callable[[list[Message]], int]


class Truncation(StrEnum):
    DISABLED = "disabled"
    AUTO = "auto"
    OLDEST = "oldest"
    RANKED = "ranked"


@dataclass(frozen=True, slots=True)
class TruncatedChat:
    messages: list[Message]
    turns: int = 0  # dropped
    blocks: int = 0  # dropped

    @property
    def effect(self) -> str | None:
        """`turns=2, blocks=1`; None when nothing was dropped."""
        counts = (("turns", self.turns), ("blocks", self.blocks))
        return ", ".join(f"{name}={number}" for name, number in counts if number) or None


def fit(
    messages: list[Message],
    limit: int,
    count: Count,
    truncation: Truncation,
    rough: Count | None = None,
) -> TruncatedChat:
    """Drops as little as possible. `count` gives the prompt's tokens and `limit` their maximum;
    `rough` is a cheap approximation of `count` that saves exact counts. Raises ContextLengthExceeded
    when dropping everything that may be dropped is not enough."""
    needed = count(messages)
    if needed <= limit:
        return TruncatedChat(messages)
    blocks = [] if truncation is Truncation.OLDEST else _ranked(messages)
    turns = [] if truncation is Truncation.RANKED else _turns(messages)
    max_drops = len(blocks) + max(0, len(turns) - 1)
    if truncation is Truncation.DISABLED or max_drops < 1:
        raise too_long(needed, limit)

    def _dropped(number: int) -> TruncatedChat:
        parts = min(number, len(blocks))
        left = _drop_parts(messages, {(i, j) for _rank, i, j in blocks[:parts]})
        return TruncatedChat(_drop_turns(left, turns, number - parts), number - parts, parts)

    guess = 1
    if rough is not None:
        # Tokens that the template adds, averaged over the messages.
        overhead = max(0.0, (needed - rough(messages)) / len(messages))
        guess = _bisect(
            1,
            max_drops,
            lambda n: rough(m := _dropped(n).messages) + overhead * len(m) <= limit,
        )
    least = _gallop(guess, max_drops, lambda n: count(_dropped(n).messages) <= limit)
    if least is None:
        raise too_long(count(_dropped(max_drops).messages), limit)
    return _dropped(least)


def too_long(needed: int, limit: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"The prompt has {needed} tokens; at most {limit} fit the context.",
        next_step="Shorten it, lower max_tokens, or set truncation to auto, oldest or ranked.",
        param="messages",
    ).counted(needed, None, limit)


def _bisect(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The least number from `low` that fits, given that `high` fits. Binary search: dropping more
    never makes a prompt longer."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _gallop(guess: int, max_drops: int, fits: Callable[[int], bool]) -> int | None:
    """Like `_bisect`, with a galloping search from `guess`. None when not even `max_drops` fits."""
    step, low, high = 1, 0, guess
    if fits(guess):
        while high - step > 0 and fits(high - step):
            high, step = high - step, 2 * step
        low = max(0, high - step)
    else:
        while not fits(high):
            if high == max_drops:
                return None
            low, high, step = high, min(max_drops, high + step), 2 * step
    return _bisect(low + 1, high, fits)


def _turns(messages: Sequence[Message]) -> list[int]:
    """The indices of the user messages, at which turns begin."""
    return [index for index, message in enumerate(messages) if message.get("role") == "user"]


def _drop_turns(messages: list[Message], starts: list[int], number: int) -> list[Message]:
    if number < 1:
        return messages
    dropped = range(starts[0], starts[number])
    return [
        message
        for index, message in enumerate(messages)
        # A system message within a conversation is an instruction, not part of a turn: it stays.
        if index not in dropped or message.get("role") in ("system", "developer")
    ]


def _ranked(messages: Sequence[Message]) -> list[tuple[int, int, int]]:
    """(rank, message, part) of every ranked part, worst rank first, later parts before earlier."""
    ranked = [
        (part["rank"], i, j)
        for i, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for j, part in enumerate(message["content"])
        if isinstance(part, Mapping) and type(part.get("rank")) is int
    ]
    return sorted(ranked, reverse=True)


def _drop_parts(messages: list[Message], dropped_parts: set[tuple[int, int]]) -> list[Message]:
    if not dropped_parts:
        return messages
    return [
        {
            **message,
            "content": [p for j, p in enumerate(message["content"]) if (i, j) not in dropped_parts],
        }
        if isinstance(message.get("content"), list)
        else message
        for i, message in enumerate(messages)
    ]
