"""Which server has likely cached which prompt, learned from where prompts were sent.

A server evicts what it used least recently; so does this, with as many blocks a server as its cache can
hold. Blocks are cut from the prompt's text, as the server's tokens are not known here.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from gateway.engines.routing.prefix_index import PrefixIndex

BLOCK_BYTES = 256
BLOCK_TOKENS = 64  # what a block of English text has, about
_MAX_BLOCKS = 4096  # of one prompt: a megabyte of text


def block_keys(root: str, text: bytes) -> Iterator[bytes]:
    """A key for each whole block of the text, which depends on everything before it. Texts with
    different roots (model, cache salt) share no key."""
    key = hashlib.blake2b(root.encode(), digest_size=16).digest()
    last = min(len(text) // BLOCK_BYTES, _MAX_BLOCKS)
    for start in range(0, last * BLOCK_BYTES, BLOCK_BYTES):
        block = text[start : start + BLOCK_BYTES]
        key = hashlib.blake2b(key + block, digest_size=16).digest()
        yield key


class LearnedPrefixes:
    """Blocks by server; the least recently sent go first."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: blocks of a server whose own capacity is not known."""
        self._capacity = capacity
        self._index = PrefixIndex()
        self._recent: dict[str, OrderedDict[bytes, None]] = {}

    def overlap(self, keys: Sequence[bytes]) -> dict[str, int]:
        """The number of leading blocks that each server likely holds, where it holds any."""
        return self._index.overlap(keys)

    def blocks(self, server: str) -> int:
        return self._index.blocks(server)

    def sent(self, server: str, keys: Sequence[bytes], capacity: int = 0) -> None:
        """The prompt with these keys was sent to the server, which caches `capacity` blocks; 0 where
        that is not known."""
        recent = self._recent.setdefault(server, OrderedDict())
        for key in keys:
            recent[key] = None
            recent.move_to_end(key)
        self._index.store(server, keys)
        while len(recent) > (capacity or self._capacity):
            dropped, _ = recent.popitem(last=False)
            self._index.drop(server, [dropped])

    def forget(self, server: str) -> None:
        """The server restarted, or is gone."""
        self._recent.pop(server, None)
        self._index.forget(server)
