"""Recent use of adapters."""

from core.clock import Clock

HALF_LIFE_S = 300.0
MAX_PRELOADED = 16  # adapters of a model that are kept loaded on every replica
_MIN_COUNT = 2.0  # decayed count of requests from which on an adapter is kept loaded


class AdapterPopularity:
    """A request count per adapter, with a half-life of five minutes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: dict[str, tuple[float, float]] = {}  # digest -> (count, at monotonic time)

    def note(self, digest: str, times: float = 1.0) -> None:
        now = self._clock.monotonic()
        self._counts[digest] = (self._now(digest, now) + times, now)

    def most_used(self, among: set[str], limit: int = MAX_PRELOADED) -> list[str]:
        now = self._clock.monotonic()
        counts = {digest: self._now(digest, now) for digest in list(self._counts)}
        for digest, popularity in counts.items():
            if popularity < 0.1:
                del self._counts[digest]
        ready = [
            digest
            for digest, popularity in counts.items()
            if popularity >= _MIN_COUNT and digest in among
        ]
        return sorted(ready, key=lambda digest: -counts[digest])[:limit]

    def _now(self, digest: str, now: float) -> float:
        count, at = self._counts.get(digest, (0.0, now))
        return float(count * 0.5 ** ((now - at) / HALF_LIFE_S))
