"""Detects engines that hang while their connection stays open.

An engine must send heartbeats (or answer a state request) and a first token for each request. A
silent engine gets no new requests while another replica serves its model, and requests that wait
there for their first token move to another replica. The circuit breaker also opens for an engine that
is alive but produces no token for much longer than expected.
"""

import asyncio
import logging

from core import metrics
from gateway.engines.base import engine_gone
from gateway.routing.replicas import Place, Waiting
from gateway.routing.router import Router

log = logging.getLogger("tollhouse.routing")
LOOK_S = 0.25
_LATE_S = 0.5  # a check that is later than this is skipped: this process itself was blocked
# Multiples of the expected time to the first token, and minimum seconds.
_SILENT_FACTOR, _SILENT_LEAST_S = 2.0, 2.0
_STUCK_FACTOR, _STUCK_LEAST_S = 10.0, 5.0


class HungEngines:
    def __init__(self, router: Router) -> None:
        self._router = router
        self._clock = router.clock

    async def run(self) -> None:
        """Run until cancelled."""
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
            log.warning("%s %s", place.name, "stopped responding" if silent else "responds again")

    def _relieve(self, place: Place, places: list[Place], now: float) -> None:
        """Move overdue requests away, if another replica can take them."""
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
