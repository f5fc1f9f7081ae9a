"""Recent use of adapters."""

from core.clock import Clock

HALF_LIFE_S = 300.0
MOST = 16  # adapters of a model that are kept loaded on every replica
_ENOUGH = 2.0  # decayed count of requests from which on an adapter is kept loaded


class AdapterHeat:
    """A request count per adapter, with a half-life of five minutes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heat: dict[str, tuple[float, float]] = {}  # digest -> (count, at monotonic time)

    def note(self, digest: str, times: float = 1.0) -> None:
        now = self._clock.monotonic()
        self._heat[digest] = (self._now(digest, now) + times, now)

    def hottest(self, among: set[str], most: int = MOST) -> list[str]:
        now = self._clock.monotonic()
        found = {digest: self._now(digest, now) for digest in list(self._heat)}
        for digest, heat in found.items():
            if heat < 0.1:
                del self._heat[digest]
        ready = [digest for digest, heat in found.items() if heat >= _ENOUGH and digest in among]
        return sorted(ready, key=lambda digest: -found[digest])[:most]

    def _now(self, digest: str, now: float) -> float:
        count, at = self._heat.get(digest, (0.0, now))
        return float(count * 0.5 ** ((now - at) / HALF_LIFE_S))
