"""The beginnings of long prompts with their token ids, each as one entry: a conversation's next turn
takes up all turns before it by one look-up, and not piece by piece.

A beginning ends where another piece may begin (`prefix_tokens`). Kept are the last such place of a
prompt, which the next turn repeats, and where the pieces end that were known before, which prompts
with another last message share.
"""

from collections import OrderedDict
from collections.abc import Sequence
from sys import getsizeof

from msgspec import Struct

LEAST = 4_096  # characters; shorter beginnings are found piece by piece
TAIL = 4_096  # characters at a text's end in which a known beginning may end
_ENTRY_BYTES = 300  # of dictionaries, beside text and ids


class Beginning(Struct, frozen=True):
    length: int  # characters
    ids: list[int]
    shared: bool  # by prompts that go on differently


NOTHING = Beginning(0, [], shared=False)


class Beginnings:
    """Of the prompts of all tenants, each its own. The least recently used are dropped. The caller
    holds a lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], Beginning] = OrderedDict()
        self._of_length: dict[tuple[str, int], int] = {}  # how many entries of a tenant have it
        self.bytes = 0

    def longest(self, tenant_id: str, text: str, places: Sequence[int]) -> Beginning:
        """The longest kept beginning that ends at one of the places, which ascend."""
        for place in reversed(places):
            if (tenant_id, place) in self._of_length:
                key = (tenant_id, text[:place])
                found = self._entries.get(key)
                if found is not None:
                    self._entries.move_to_end(key)
                    return found
        return NOTHING

    def keep(self, tenant_id: str, beginning: str, ids: list[int], *, shared: bool) -> None:
        key = (tenant_id, beginning)
        known = self._entries.get(key)
        if known is not None:
            if shared and not known.shared:
                self._entries[key] = Beginning(known.length, known.ids, shared=True)
            return
        length = (tenant_id, len(beginning))
        self._entries[key] = Beginning(len(beginning), ids, shared=shared)
        self._of_length[length] = self._of_length.get(length, 0) + 1
        self.bytes += _size(beginning, ids)
        while self.bytes > self._max_bytes:
            self.drop(*next(iter(self._entries)))

    def drop(self, tenant_id: str, beginning: str) -> None:
        found = self._entries.pop((tenant_id, beginning), None)
        if found is None:
            return
        length = (tenant_id, found.length)
        self.bytes -= _size(beginning, found.ids)
        self._of_length[length] -= 1
        if not self._of_length[length]:
            del self._of_length[length]


def _size(text: str, ids: list[int]) -> int:
    return getsizeof(text) + getsizeof(ids) + _ENTRY_BYTES
