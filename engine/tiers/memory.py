"""The tier in this process's memory."""

import threading
import time
from collections.abc import Callable

from engine.tiers.recent import Recent


class MemoryTier:
    """Implements `engine.tiers.tier.Tier`."""

    label = "ram"
    listed = True

    def __init__(
        self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._recent = Recent(max_bytes, ttl_s, clock)
        self._data: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def holds(self, name: str) -> bool:
        with self._lock:
            return name in self._recent

    def names(self) -> list[str]:
        with self._lock:
            return self._recent.names()

    def read(self, names: list[str]) -> list[bytes]:
        found: list[bytes] = []
        with self._lock:
            for name in names:
                if name not in self._recent:
                    break
                self._recent.touch(name)
                found.append(self._data[name])
        return found

    def write(self, name: str, data: bytes) -> list[str]:
        with self._lock:
            if len(data) > self._recent.max_bytes:
                return []
            self._data[name] = data
            gone = self._recent.add(name, len(data))
            for each in gone:
                self._data.pop(each, None)
        return gone

    def erase(self, prefix: str) -> list[str]:
        with self._lock:
            gone = self._recent.under(prefix)
            for name in gone:
                self._drop(name)
        return gone

    def discard(self, name: str) -> None:
        with self._lock:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._recent.remove(name)
        self._data.pop(name, None)

    def close(self) -> None:
        pass
