"""Which leases end when, kept by the second: one that is given back early leaves nothing behind, where
a heap would keep it for as long as it was to last.
"""

from collections.abc import Iterator
from math import inf

Key = tuple[str, str]


class Expiries:
    """Milliseconds by key. Not safe for threads."""

    def __init__(self) -> None:
        self._by_second: dict[int, dict[Key, int]] = {}
        self.soonest: float = inf  # ms; nothing ends before it

    def __len__(self) -> int:
        return sum(map(len, self._by_second.values()))

    def add(self, key: Key, at: int) -> None:
        second = at // 1000
        known = self._by_second.get(second)
        if known is None:
            known = self._by_second[second] = {}
            self.soonest = min(self.soonest, second * 1000)
        known[key] = at

    def remove(self, key: Key, at: int) -> None:
        """A key that was added with this time; others are left alone."""
        known = self._by_second.get(at // 1000)
        if known is not None and known.pop(key, None) is not None and not known:
            del self._by_second[at // 1000]

    def due(self, now: int) -> Iterator[Key]:
        """Remove and give the keys that end by `now`, the first ones first. Others may be added
        meanwhile."""
        while self._by_second:
            second = min(self._by_second)
            self.soonest = second * 1000
            if self.soonest > now:
                return
            known = self._by_second[second]
            ended = sorted([(at, key) for key, at in known.items() if at <= now])
            for at, key in ended:
                self.remove(key, at)
                yield key
            if not ended:
                return
        self.soonest = inf
