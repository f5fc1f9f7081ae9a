"""Remembers which replica served a conversation's last turn, identified by its messages.

A turn begins with all messages of the turn before. The map holds one hash per conversation (Python's
per-process hash) and only breaks ties, so a collision costs a cold start at most.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_ENTRIES = 50_000
_MAX_NEW_MESSAGES = 8  # messages that a turn may add, including tool calls and their results


class Conversations:
    def __init__(self, max_entries: int = _MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._last_replica: OrderedDict[int, str] = OrderedDict()

    def last(self, hashes: Sequence[int]) -> str | None:
        """The replica of the latest known turn that these messages continue."""
        for prefix_hash in reversed(hashes[-_MAX_NEW_MESSAGES - 1 : -1]):
            found = self._last_replica.get(prefix_hash)
            if found is not None:
                return found
        return None

    def note(self, hashes: Sequence[int], replica: str) -> None:
        if hashes:
            self._last_replica[hashes[-1]] = replica
            self._last_replica.move_to_end(hashes[-1])
            if len(self._last_replica) > self._max_entries:
                self._last_replica.popitem(last=False)


def prefix_hashes(
    namespace: str, model: str, adapter: str | None, messages: Sequence[Mapping[str, Any]] | None
) -> list[int]:
    """A hash of every prefix of the list of messages."""
    prefix_hash = hash((namespace, model, adapter))
    found = []
    for message in messages or ():
        content = message.get("content")
        text = content if isinstance(content, str) else repr(content)
        prefix_hash = hash((prefix_hash, message.get("role"), text))
        found.append(prefix_hash)
    return found
