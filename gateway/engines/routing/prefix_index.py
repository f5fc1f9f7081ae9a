"""Which replica caches which blocks of which prefix: a mirror of the engines' prefix caches.

Copies in the tiers of an engine (memory, disk) have an index of their own, `below`.

It follows the engines' KV events (stored, removed, cleared), so evicted blocks disappear here too; it
does not infer anything from requests. Keys are those of `engine.cache.prefix`, rooted in the tenant and
adapter.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from engine.protocol import KvEvent


class PrefixIndex:
    """A bit per replica and a mask per block: walking a chain takes one look-up and one `and` each."""

    def __init__(self) -> None:
        self._names: list[str] = []  # the index in this list is the replica's bit
        self._bits: dict[str, int] = {}
        self._masks: dict[bytes, int] = {}
        self._blocks: dict[str, int] = {}
        self._below: dict[str, PrefixIndex] = {}  # by tier

    def apply(self, replica: str, events: Iterable[KvEvent]) -> None:
        for event in events:
            if event.tier:
                tier = self._below.setdefault(event.tier, PrefixIndex())
                tier.apply(replica, [replace(event, tier="")])
            elif event.kind == "stored":
                self.store(replica, map(bytes.fromhex, event.hashes))
            elif event.kind == "removed":
                self.drop(replica, map(bytes.fromhex, event.hashes))
            else:
                self.forget(replica)

    def store(self, replica: str, keys: Iterable[bytes]) -> None:
        bit = self._bit(replica)
        for key in keys:
            mask = self._masks.get(key, 0)
            if not mask & bit:
                self._masks[key] = mask | bit
                self._blocks[replica] += 1

    def drop(self, replica: str, keys: Iterable[bytes]) -> None:
        bit = self._bit(replica)
        for key in keys:
            self._drop(key, bit, replica)

    def forget(self, replica: str) -> None:
        """Drop everything about a replica that restarted or whose events were missed."""
        for tier in self._below.values():
            tier.forget(replica)
        if self._blocks.get(replica):
            bit = self._bits[replica]
            for key in [key for key, mask in self._masks.items() if mask & bit]:
                self._drop(key, bit, replica)

    def overlap(self, keys: Iterable[bytes]) -> dict[str, int]:
        """The number of leading blocks of the chain that each replica holds, where it holds any.
        Reads keys up to the first block that no replica holds."""
        depths: dict[str, int] = {}
        candidates, depth = (1 << len(self._names)) - 1, 0
        for key in keys:
            held = self._masks.get(key, 0) & candidates
            if held != candidates:
                self._note(depths, candidates & ~held, depth)
                candidates = held
                if not candidates:
                    return depths
            depth += 1
        self._note(depths, candidates, depth)
        return depths

    def overlap_below(self, keys: Sequence[bytes]) -> dict[str, int]:
        """The same for the copies in a replica's tiers: the deepest of its tiers counts."""
        depths: dict[str, int] = {}
        for tier in self._below.values():
            for replica, depth in tier.overlap(keys).items():
                depths[replica] = max(depth, depths.get(replica, 0))
        return depths

    @property
    def has_tiers(self) -> bool:
        return bool(self._below)

    def knows(self, replica: str) -> bool:
        """Whether the replica, or a tier of it, holds anything."""
        return any(each.blocks(replica) for each in (self, *self._below.values()))

    def blocks(self, replica: str) -> int:
        return self._blocks.get(replica, 0)

    def _note(self, depths: dict[str, int], mask: int, depth: int) -> None:
        while mask and depth:
            lowest = mask & -mask
            depths[self._names[lowest.bit_length() - 1]] = depth
            mask ^= lowest

    def _bit(self, replica: str) -> int:
        bit = self._bits.get(replica)
        if bit is None:
            bit = self._bits[replica] = 1 << len(self._names)
            self._names.append(replica)
            self._blocks[replica] = 0
        return bit

    def _drop(self, key: bytes, bit: int, replica: str) -> None:
        mask = self._masks.get(key, 0)
        if mask & bit:
            self._blocks[replica] -= 1
            if mask == bit:
                del self._masks[key]
            else:
                self._masks[key] = mask ^ bit
