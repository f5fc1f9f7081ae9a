"""Loads adapters on replicas, once each, however many requests wait for the load."""

import asyncio
import logging

from core.clock import Clock
from core.errors import EngineLost, Unavailable
from gateway.catalog.catalog import NamedAdapter
from gateway.engines.routing.replicas import Replica
from gateway.engines.routing.suspects import Suspects
from gateway.request.engine import engine_lost

log = logging.getLogger("tollhouse.routing")


class AdapterLoads:
    def __init__(self, clock: Clock, suspects: Suspects) -> None:
        self._clock = clock
        self._suspects = suspects
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._since: dict[tuple[str, str], float] = {}
        self._hung: dict[str, float] = {}  # when an engine was lost that read it, by digest

    async def ensure(self, replica: Replica, adapter: NamedAdapter) -> None:
        """Load the adapter on the replica unless it is registered there."""
        if replica.has(adapter.digest):
            return
        key, asked_at = (replica.name, adapter.digest), self._clock.monotonic()
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                if self._hung.get(adapter.digest, -1.0) >= asked_at:
                    raise engine_lost(replica.name, f"it stopped reading {adapter.name}")
                if not replica.has(adapter.digest):
                    await self._load(replica, adapter)
        finally:
            if not lock.locked():
                self._locks.pop(key, None)

    def under_way(self) -> list[dict[str, object]]:
        """The loads in progress and their durations in seconds."""
        now = self._clock.monotonic()
        return [
            {"engine": engine, "adapter": digest[:12], "for_s": round(now - since, 1)}
            for (engine, digest), since in self._since.items()
        ]

    async def _load(self, replica: Replica, adapter: NamedAdapter) -> None:
        key = (replica.name, adapter.digest)
        began = self._since[key] = self._clock.monotonic()
        log.info("loading the adapter %s on %s", adapter.name, replica.name)
        try:
            state = await replica.client.load_adapter(adapter.path, adapter.digest)
        except EngineLost:
            self._hung[adapter.digest] = self._clock.monotonic()
            self._suspects.hung(adapter)
            raise
        finally:
            del self._since[key]
        spent = self._clock.monotonic() - began
        if state.digest != adapter.digest:
            raise Unavailable(
                f"The files of the adapter {adapter.name} have changed since it was registered.",
                next_step="Register the adapter again.",
                code="adapter_changed",
            )
        replica.record_adapter_load(spent)
        log.info("loaded the adapter %s on %s in %.2f s", adapter.name, replica.name, spent)


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
