"""Detects engines that hang while their connection stays open.

An engine must send heartbeats (or answer a state request) and a first token for each request. A
silent engine gets no new requests while another replica serves its model, and requests that wait
there for their first token move to another replica, unless the engine had begun with them: one of
these may be why it hangs. The circuit breaker also opens for an engine that
is alive but produces no token for much longer than expected.
"""

import asyncio
import logging

from core import metrics
from gateway.engines.routing.replicas import Replica, WaitingRequest
from gateway.engines.routing.router import Router
from gateway.request.engine import engine_unavailable

log = logging.getLogger("tollhouse.routing")
CHECK_EVERY_S = 0.25
_LATE_S = 0.5  # a check that is later than this is skipped: this process itself was blocked
# Multiples of the expected time to the first token, and minimum seconds.
_SILENT_FACTOR, _SILENT_LEAST_S = 2.0, 2.0
_STUCK_FACTOR, _STUCK_LEAST_S = 10.0, 5.0


class HungEngines:
    def __init__(self, router: Router) -> None:
        self._router = router
        self._clock = router.clock
        self._served: dict[str, bool] = {}  # by model

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            began = self._clock.monotonic()
            await asyncio.sleep(CHECK_EVERY_S)
            if self._clock.monotonic() - began < CHECK_EVERY_S + _LATE_S:
                self.look()

    def look(self) -> None:
        for replica in self._router.replicas():
            self._update_silence(
                replica, silent=replica.client.healthy() and replica.client.silent()
            )
        models = self._router.models()
        served = {model: any(each.serves() for each in replicas) for model, replicas in models}
        if served != self._served:
            self._show(served)
        now = self._clock.monotonic()
        for _, replicas in models:
            if len(replicas) > 1:
                for replica in replicas:
                    self._move_overdue(replica, replicas, now)

    def _show(self, served: dict[str, bool]) -> None:
        for model in self._served.keys() - served.keys():  # removed by a reload
            metrics.unserved_models.labels(model).set(0)
        for model, is_served in served.items():
            if self._served.get(model) == is_served:
                continue
            metrics.unserved_models.labels(model).set(0 if is_served else 1)
            if model in self._served:
                log.warning(
                    "%s is %s", model, "served again" if is_served else "served by no engine"
                )
        self._served = served

    def _update_silence(self, replica: Replica, *, silent: bool) -> None:
        if silent == replica.silent:
            return
        replica.silent = silent
        if silent:
            log.warning("%s stopped responding", replica.name)
        elif replica.client.healthy():  # else it has disconnected, which its client logs
            log.warning("%s responds again", replica.name)

    def _move_overdue(self, replica: Replica, replicas: list[Replica], now: float) -> None:
        """Move overdue requests away, if another replica can take them."""
        overdue = [
            each
            for each in replica.waiting.values()
            if _overdue(replica, each, now) and not each.generation.begun()
        ]
        if not overdue or not any(
            p.serves() and not p.silent for p in replicas if p is not replica
        ):
            return
        metrics.hung.labels(replica.name).inc(len(overdue))
        replica.mark_hung("no first token in time")
        for each in overdue:
            each.generation.terminate(engine_unavailable(replica.name, "no first token in time"))


def _overdue(replica: Replica, waiting: WaitingRequest, now: float) -> bool:
    waited = now - waiting.since
    if replica.silent:
        return waited > max(_SILENT_LEAST_S, _SILENT_FACTOR * waiting.expected_s)
    if waiting.whole or replica.client.last_output() > waiting.since:
        return False
    return waited > max(_STUCK_LEAST_S, _STUCK_FACTOR * waiting.expected_s)
