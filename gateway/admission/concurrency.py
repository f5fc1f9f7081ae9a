"""Limits how many requests this process runs at once, and sheds low priorities first.

Lower priorities may use less of the capacity, so free plans are refused before premium ones wait.
Plans with a queue wait here in weighted fair order between tenants.
"""

import asyncio

from core.clock import Clock
from core.tenants.plans import BATCH_PRIORITY
from gateway.admission.fair_queue import FairQueue
from gateway.admission.rejections import Overloaded
from gateway.admission.request import AdmissionRequest
from gateway.http.exchange import ClientDisconnected

# Share of the capacity, in permille, up to which each priority is admitted.
SHARE_PERMILLE = {BATCH_PRIORITY: 500, 0: 800, 1: 900}
_SMOOTHING = 0.1


class ConcurrencyLimiter:
    def __init__(self, clock: Clock, capacity: int) -> None:
        self._clock = clock
        self._capacity = capacity
        self._active = 0
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._last_release = clock.monotonic()
        self._mean_interval_s = 1.0  # moving mean of the time between two completions

    async def acquire(self, request: AdmissionRequest) -> None:
        if self._capacity == 0 or (self._admits(request.plan.priority) and not len(self._queue)):
            self._active += 1
            return
        if request.plan.queue_wait_s <= 0 or len(self._queue) >= request.plan.queue_length:
            raise self._overloaded()
        turn = asyncio.get_running_loop().create_future()
        ticket = self._queue.push(
            request.tenant_id, request.plan.weight, request.prompt_tokens + 1, turn
        )
        request.watch_disconnect(turn)
        bound = min(request.plan.queue_wait_s, request.deadline_s or request.plan.queue_wait_s)
        try:
            await asyncio.wait((turn,), timeout=bound)
            if turn.cancelled():
                raise ClientDisconnected
            if not turn.done():
                raise self._overloaded()
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            raise
        finally:
            self._queue.remove(ticket)
            if not turn.done():
                turn.cancel()

    def release(self) -> None:
        now = self._clock.monotonic()
        self._mean_interval_s += _SMOOTHING * (now - self._last_release - self._mean_interval_s)
        self._last_release = now
        self._active -= 1
        while self._active < self._capacity and len(self._queue):
            ticket = self._queue.heads()[0]
            self._queue.serve(ticket)
            if not ticket.item.done():
                self._active += 1
                ticket.item.set_result(None)

    def expected_wait_s(self) -> float:
        """Estimated time until the next request ends: 0.1 to 30 s."""
        return min(30.0, max(0.1, self._mean_interval_s))

    def _admits(self, priority: int) -> bool:
        return self._active * 1000 < self._capacity * SHARE_PERMILLE.get(priority, 1000)

    def _overloaded(self) -> Overloaded:
        return Overloaded(
            "The gateway is at capacity; plans of higher priority are served first.",
            next_step="Retry after the time in the retry-after header.",
            code="overloaded",
            retry_after_s=self.expected_wait_s(),
        )
