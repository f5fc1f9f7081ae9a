"""Remembers which replica served a conversation's last turn, identified by its messages.

A turn begins with all messages of the turn before. The map holds one hash per conversation (Python's
per-process hash) and only breaks ties, so a collision costs a cold start at most.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

_KEPT = 50_000
_LOOK_BACK = 8  # messages that a turn may add, including tool calls and their results


class Conversations:
    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._ran: OrderedDict[int, str] = OrderedDict()

    def last(self, marks: Sequence[int]) -> str | None:
        """The replica of the latest known turn that these messages continue."""
        for mark in reversed(marks[-_LOOK_BACK - 1 : -1]):
            found = self._ran.get(mark)
            if found is not None:
                return found
        return None

    def note(self, marks: Sequence[int], replica: str) -> None:
        if marks:
            self._ran[marks[-1]] = replica
            self._ran.move_to_end(marks[-1])
            if len(self._ran) > self._kept:
                self._ran.popitem(last=False)


def marks_of(
    namespace: str, model: str, adapter: str | None, messages: Sequence[Mapping[str, Any]] | None
) -> list[int]:
    """A hash of every prefix of the list of messages."""
    mark = hash((namespace, model, adapter))
    found = []
    for message in messages or ():
        content = message.get("content")
        said = content if isinstance(content, str) else repr(content)
        mark = hash((mark, message.get("role"), said))
        found.append(mark)
    return found
