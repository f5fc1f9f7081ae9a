"""Names and sizes in the order of use, within a bound of bytes and of age."""

from collections import OrderedDict
from collections.abc import Callable


class Recent:
    """The least recently used names go first; names unused for `ttl_s` are gone."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self.bytes = 0

    def __contains__(self, name: str) -> bool:
        entry = self._entries.get(name)
        return entry is not None and self._clock() - entry[1] < self._ttl_s

    def names(self) -> list[str]:
        return [name for name in list(self._entries) if name in self]

    def add(self, name: str, size: int, used_at: float | None = None) -> list[str]:
        """Add or replace a name as the newest; returns what exceeds the bounds."""
        self.remove(name)
        self._entries[name] = size, self._clock() if used_at is None else used_at
        self.bytes += size
        gone = []
        while self._entries:
            oldest = next(iter(self._entries))
            if self.bytes <= self.max_bytes and oldest in self:
                break
            self.remove(oldest)
            gone.append(oldest)
        return gone

    def touch(self, name: str) -> None:
        if name in self._entries:
            self._entries[name] = self._entries[name][0], self._clock()
            self._entries.move_to_end(name)

    def remove(self, name: str) -> None:
        size, _ = self._entries.pop(name, (0, 0.0))
        self.bytes -= size

    def under(self, prefix: str) -> list[str]:
        return [name for name in self._entries if name.startswith(prefix)]
