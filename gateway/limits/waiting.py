"""Queues of requests over a limit: one per tenant, bounded, fair between its keys.

A queue retries the head of each flow in fair order when a request of the tenant ends, when a bucket
should have refilled, and at least every second, because other processes return capacity too.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core import metrics
from core.clock import Clock
from core.counters import Denial
from core.errors import TollhouseError
from gateway.limits.fair_queue import FairQueue
from gateway.limits.refusals import OverLimit, over_limit
from gateway.limits.wishes import Ask

if TYPE_CHECKING:
    from gateway.limits.limiter import Reservation

Attempt = Callable[[Ask], Awaitable["Reservation | Denial"]]
_POLL_S = 1.0


@dataclass(slots=True, eq=False)
class _Waiter:
    ask: Ask
    attempt: Attempt
    answer: "asyncio.Future[Reservation]"
    denial: Denial | None = None


class WaitingRooms:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rooms: dict[str, _Room] = {}

    def has_waiting(self, tenant_id: str) -> bool:
        return tenant_id in self._rooms

    def wake(self, tenant_id: str) -> None:
        room = self._rooms.get(tenant_id)
        if room is not None:
            room.wake.set()

    async def wait(self, ask: Ask, attempt: Attempt) -> "Reservation":
        """Admitted in turn, or refused at the plan's wait bound and no later than the deadline."""
        room = self._rooms.get(ask.tenant_id)
        if room is None:
            room = self._rooms[ask.tenant_id] = _Room()
        if len(room.queue) >= ask.plan.queue_length:
            raise _full(ask)
        answer: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(ask, attempt, answer)
        cost = ask.prompt_tokens + (ask.max_output_tokens or ask.plan.expected_output)
        ticket = room.queue.push(ask.key_id, 1, cost, waiter)
        metrics.limit_queue.inc()
        metrics.limit_queue_place.observe(room.queue.place(ticket))
        began = self._clock.monotonic()
        room.start(lambda: self._rooms.pop(ask.tenant_id, None))
        bound = min(ask.plan.queue_wait_s, ask.deadline_s or ask.plan.queue_wait_s)
        try:
            await asyncio.wait((answer,), timeout=bound)
            if answer.done():
                return answer.result()
            raise _too_long(waiter, bound)
        except asyncio.CancelledError:
            await _give_back(answer)
            raise
        finally:
            answer.cancel()
            room.queue.remove(ticket)
            room.wake.set()
            metrics.limit_queue.dec()
            waited = self._clock.monotonic() - began
            metrics.limit_queue_seconds.labels(_reason(waiter)).observe(waited)


class _Room:
    def __init__(self) -> None:
        self.queue: FairQueue[_Waiter] = FairQueue()
        self.wake = asyncio.Event()
        self._usher: asyncio.Task[None] | None = None

    def start(self, on_empty: Callable[[], object]) -> None:
        if self._usher is None:
            self._usher = asyncio.get_running_loop().create_task(self._admit(on_empty))

    async def _admit(self, on_empty: Callable[[], object]) -> None:
        while len(self.queue):
            self.wake.clear()
            pause = await self._round()
            if not len(self.queue):
                break
            try:
                await asyncio.wait_for(self.wake.wait(), pause)
            except TimeoutError:
                continue
        on_empty()

    async def _round(self) -> float:
        """Try the head of every flow once. Returns the seconds until the next round."""
        pause = _POLL_S
        for ticket in self.queue.heads():
            waiter = ticket.item
            if waiter.answer.done():
                self.queue.remove(ticket)
                continue
            try:
                result = await waiter.attempt(waiter.ask)
            except TollhouseError as error:
                self.queue.remove(ticket)
                if not waiter.answer.done():
                    waiter.answer.set_exception(error)
                continue
            if isinstance(result, Denial):
                waiter.denial = result
                pause = min(pause, max(0.001, (result.wait_ms or 1000) / 1000))
                continue
            self.queue.serve(ticket)
            pause = 0.001
            if waiter.answer.done():  # the client left during the admission
                await _return(result)
            else:
                waiter.answer.set_result(result)
        return pause


async def _give_back(answer: "asyncio.Future[Reservation]") -> None:
    if answer.done() and not answer.cancelled() and answer.exception() is None:
        await _return(answer.result())


async def _return(held: "Reservation") -> None:
    wish = held.wished.wish
    await held.home.settle(wish.group, wish.id, [0] * len(wish.takes), 0)


def _reason(waiter: _Waiter) -> str:
    """The first limit that refused the request, or `turn`."""
    return waiter.denial.keys[0].rpartition(":")[0] if waiter.denial else "turn"


def _full(ask: Ask) -> OverLimit:
    metrics.rejections.labels("queue_full").inc()
    return OverLimit(
        f"The plan's queue of {ask.plan.queue_length} waiting requests is full.",
        next_step="Retry after the time in the retry-after header.",
        code="queue_full",
        retry_after_s=ask.plan.queue_wait_s or 1.0,
    )


def _too_long(waiter: _Waiter, bound_s: float) -> OverLimit:
    metrics.rejections.labels("queue_timeout").inc()
    if waiter.denial is not None:
        return over_limit(waiter.denial, _POLL_S)
    return OverLimit(
        f"The request waited {bound_s:g} s in the plan's queue without being admitted.",
        next_step="Retry after the time in the retry-after header.",
        code="queue_timeout",
        retry_after_s=1.0,
    )
