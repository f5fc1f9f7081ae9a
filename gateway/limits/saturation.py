"""Limits how many requests this process runs at once, and sheds low priorities first.

Lower priorities may use less of the capacity, so free plans are refused before premium ones wait.
Plans with a queue wait here in weighted fair order between tenants.
"""

import asyncio

from core import metrics
from core.clock import Clock
from core.errors import Unavailable
from core.tenants.plans import BATCH_PRIORITY
from gateway.limits.fair_queue import FairQueue
from gateway.limits.wishes import Ask

# Share of the capacity, in permille, up to which each priority is admitted.
SHARE_PERMILLE = {BATCH_PRIORITY: 500, 0: 800, 1: 900}
_LEARN = 0.1


class Gate:
    def __init__(self, clock: Clock, places: int) -> None:
        self._clock = clock
        self._places = places
        self._inside = 0
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._left_at = clock.monotonic()
        self._between_s = 1.0  # moving mean of the time between two completions

    async def enter(self, ask: Ask) -> None:
        if self._places == 0 or (self._room_for(ask.plan.priority) and not len(self._queue)):
            self._inside += 1
            return
        if ask.plan.queue_wait_s <= 0 or len(self._queue) >= ask.plan.queue_length:
            raise self._full()
        turn = asyncio.get_running_loop().create_future()
        ticket = self._queue.push(ask.tenant_id, ask.plan.weight, ask.prompt_tokens + 1, turn)
        bound = min(ask.plan.queue_wait_s, ask.deadline_s or ask.plan.queue_wait_s)
        try:
            await asyncio.wait((turn,), timeout=bound)
            if not turn.done():
                raise self._full()
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise
        finally:
            self._queue.remove(ticket)
            if not turn.done():
                turn.cancel()

    def leave(self) -> None:
        now = self._clock.monotonic()
        self._between_s += _LEARN * (now - self._left_at - self._between_s)
        self._left_at = now
        self._inside -= 1
        while self._inside < self._places and len(self._queue):
            ticket = self._queue.heads()[0]
            self._queue.serve(ticket)
            if not ticket.item.done():
                self._inside += 1
                ticket.item.set_result(None)

    def typical_s(self) -> float:
        """Estimated time until the next request ends: 0.1 to 30 s."""
        return min(30.0, max(0.1, self._between_s))

    def _room_for(self, priority: int) -> bool:
        return self._inside * 1000 < self._places * SHARE_PERMILLE.get(priority, 1000)

    def _full(self) -> Unavailable:
        metrics.rejections.labels("saturated").inc()
        return Unavailable(
            "The gateway is at capacity; plans of higher priority are served first.",
            next_step="Retry after the time in the retry-after header.",
            code="overloaded",
            retry_after_s=self.typical_s(),
        )
