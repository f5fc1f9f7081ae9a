"""Which replica holds which blocks of which prefix: a mirror of the engines' own caches.

It is fed by their KV events (stored, removed), so an evicted block is gone here too; nothing is
guessed from what was sent. Keys are those of `engine.prefix`, rooted in the tenant and adapter.
"""

from collections.abc import Iterable, Sequence

from engine.protocol import KvEvent


class PrefixIndex:
    def __init__(self) -> None:
        self._holders: dict[str, set[str]] = {}  # block key -> replicas
        self._held: dict[str, set[str]] = {}  # replica -> block keys

    def apply(self, replica: str, events: Iterable[KvEvent]) -> None:
        held = self._held.setdefault(replica, set())
        for event in events:
            if event.kind == "stored":
                held.update(event.hashes)
                for key in event.hashes:
                    self._holders.setdefault(key, set()).add(replica)
            else:
                held.difference_update(event.hashes)
                for key in event.hashes:
                    self._drop(key, replica)

    def forget(self, replica: str) -> None:
        """The replica restarted, or events of it were missed: nothing is known of its cache."""
        for key in self._held.pop(replica, set()):
            self._drop(key, replica)

    def overlap(self, keys: Sequence[str]) -> dict[str, int]:
        """For each replica that has any, how many leading blocks of the chain it holds."""
        found: dict[str, int] = {}
        alive: set[str] | None = None
        for depth, key in enumerate(keys, 1):
            holders = self._holders.get(key, set())
            alive = set(holders) if alive is None else alive & holders
            if not alive:
                break
            for replica in alive:
                found[replica] = depth
        return found

    def blocks(self, replica: str) -> int:
        return len(self._held.get(replica, ()))

    def _drop(self, key: str, replica: str) -> None:
        holders = self._holders.get(key)
        if holders is not None:
            holders.discard(replica)
            if not holders:
                del self._holders[key]
