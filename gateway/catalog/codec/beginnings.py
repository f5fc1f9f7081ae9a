"""The beginnings of long prompts with their token ids, each as one entry: a conversation's next turn
takes up all turns before it by one look-up, and not piece by piece.

A beginning ends where another piece may begin (`prefix_tokens`). Kept are the last such place of a
prompt, which the next turn repeats, and where the pieces end that were known before, which prompts
with another last message share.

An entry is found by its length and last characters, and then compared as a whole: the hash of a long
text costs fifty times as much. Of several with the same, the newest is kept.
"""

from collections import OrderedDict
from collections.abc import Sequence
from sys import getsizeof

from msgspec import Struct
from msgspec.structs import replace

LEAST = 4_096  # characters; shorter beginnings are found piece by piece
TAIL = 4_096  # characters at a text's end in which a known beginning may end
_ENTRY_BYTES = 300  # dictionary overhead, without text and ids


_END = 64  # characters by which an entry is found
_Key = tuple[str, int, str]


class Beginning(Struct, frozen=True):
    length: int  # characters
    ids: list[int]  # of a prompt that begins so, and never changed
    count: int  # of these, its own
    shared: bool  # by prompts that go on differently
    text: str = ""


NOTHING = Beginning(0, [], 0, shared=False)


class Beginnings:
    """Of the prompts of all tenants, each its own. The least recently used are dropped. The caller
    holds a lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_Key, Beginning] = OrderedDict()
        self.bytes = 0

    def longest(self, tenant_id: str, text: str, places: Sequence[int]) -> Beginning:
        """The longest kept beginning that ends at one of the places, which ascend."""
        for place in reversed(places):
            key = _key(tenant_id, text, place)
            found = self._entries.get(key)
            if found is not None and text.startswith(found.text):
                self._entries.move_to_end(key)
                return found
        return NOTHING

    def has(self, tenant_id: str, text: str, length: int, *, shared: bool) -> bool:
        """Whether the text's first characters are kept, and as `shared` if that is asked."""
        found = self._entries.get(_key(tenant_id, text, length))
        return found is not None and found.shared >= shared and text.startswith(found.text)

    def keep(
        self, tenant_id: str, beginning: str, ids: list[int], count: int, *, shared: bool
    ) -> None:
        """Its ids are the first `count` of `ids`, a list that is kept as it is."""
        key = _key(tenant_id, beginning, len(beginning))
        known = self._entries.get(key)
        if known is not None and known.text == beginning:
            if shared and not known.shared:
                self._entries[key] = replace(known, shared=True)
            return
        if known is not None:
            self._drop(key)
        self._entries[key] = Beginning(len(beginning), ids, count, shared, beginning)
        self.bytes += _size(beginning, ids)
        while self.bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def drop(self, tenant_id: str, text: str, length: int) -> None:
        """The text's first characters, if they are kept."""
        key = _key(tenant_id, text, length)
        found = self._entries.get(key)
        if found is not None and text.startswith(found.text):
            self._drop(key)

    def _drop(self, key: _Key) -> None:
        found = self._entries.pop(key)
        self.bytes -= _size(found.text, found.ids)


def _key(tenant_id: str, text: str, length: int) -> _Key:
    return tenant_id, length, text[max(0, length - _END) : length]


def _size(text: str, ids: list[int]) -> int:
    return getsizeof(text) + getsizeof(ids) + _ENTRY_BYTES
