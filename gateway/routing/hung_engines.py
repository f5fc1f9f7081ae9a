"""Engines that hang with their connection open: found by what they owe, and left alone until they
speak again.

An engine owes signs of life (heartbeats, a page of its own) and a first token. One that is silent
gets nothing new while another serves its model; what waits there for its first token goes to that
other. One that is alive, yet gives nobody a token for far longer than was expected, has its breaker
opened too.
"""

import asyncio
import logging

from core import metrics
from gateway.engines.base import engine_gone
from gateway.routing.replicas import Place, Waiting
from gateway.routing.router import Router

log = logging.getLogger("tollhouse.routing")
LOOK_S = 0.25
_LATE_S = 0.5  # where this process itself was held up, it knows nothing of others' silence
# So many times the expected seconds to the first token, and so many seconds at least.
_SILENT_FACTOR, _SILENT_LEAST_S = 2.0, 2.0
_STUCK_FACTOR, _STUCK_LEAST_S = 10.0, 5.0


class HungEngines:
    def __init__(self, router: Router) -> None:
        self._router = router
        self._clock = router.clock

    async def run(self) -> None:
        """For ever."""
        while True:
            began = self._clock.monotonic()
            await asyncio.sleep(LOOK_S)
            if self._clock.monotonic() - began < LOOK_S + _LATE_S:
                self.look()

    def look(self) -> None:
        for place in self._router.places():
            self._note(place, silent=place.client.healthy() and place.client.silent())
        now = self._clock.monotonic()
        for _, places in self._router.models():
            if len(places) > 1:
                for place in places:
                    self._relieve(place, places, now)

    def _note(self, place: Place, *, silent: bool) -> None:
        if silent != place.silent:
            place.silent = silent
            log.warning("%s %s", place.name, "fell silent" if silent else "is heard of again")

    def _relieve(self, place: Place, places: list[Place], now: float) -> None:
        """Only where another can take what waits there."""
        overdue = [each for each in place.waiting.values() if _overdue(place, each, now)]
        if not overdue or not any(p.serves() and not p.silent for p in places if p is not place):
            return
        metrics.hung.labels(place.name).inc(len(overdue))
        place.hangs("no first token in time")
        for each in overdue:
            each.generation.break_off(engine_gone(place.name, "no first token in time"))


def _overdue(place: Place, waiting: Waiting, now: float) -> bool:
    waited = now - waiting.since
    if place.silent:
        return waited > max(_SILENT_LEAST_S, _SILENT_FACTOR * waiting.expected_s)
    if waiting.whole or place.client.last_output() > waiting.since:
        return False
    return waited > max(_STUCK_LEAST_S, _STUCK_FACTOR * waiting.expected_s)
