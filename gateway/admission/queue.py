"""Queues in weighted fair order: for this process's capacity, and for the limits of each tenant.

`ConcurrencyLimiter` limits how many requests this process runs at once. Lower priorities may use less
of the capacity, so free plans are refused before premium ones wait; plans with a queue wait in fair
order between tenants.

`TenantQueues` holds requests over a limit: one queue per tenant, bounded, fair between its keys. A
queue retries the head of each flow in fair order when a request of the tenant ends, when a bucket
should have refilled, and at least every second, because other processes return capacity too.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from core import metrics
from core.clock import Clock
from core.counters import Denial
from core.fair_queue import FairQueue
from core.tenants.plans import BATCH_PRIORITY
from gateway.admission.rejections import OverLimit, Overloaded, over_limit_error
from gateway.admission.request import AdmissionRequest
from gateway.admission.reservation import Reservation
from gateway.request.exchange import ClientDisconnected

Attempt = Callable[[AdmissionRequest], Awaitable[Reservation | Denial]]
_POLL_S = 1.0
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

    def try_acquire(self, priority: int) -> bool:
        """Whether the request runs without waiting: `release` follows then."""
        if self._capacity and (len(self._queue) or not self._admits(priority)):
            return False
        self._active += 1
        return True

    async def acquire(self, request: AdmissionRequest) -> None:
        if self.try_acquire(request.plan.priority):
            return
        if request.plan.queue_wait_s <= 0 or len(self._queue) >= request.plan.queue_length:
            raise self._overloaded()
        turn = asyncio.get_running_loop().create_future()
        ticket = self._queue.push(
            request.tenant_id, request.plan.weight, request.prompt_tokens + 1, turn
        )
        request.watch_disconnect(turn)
        try:
            await asyncio.wait((turn,), timeout=request.wait_bound_s)
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
        if not len(self._queue):
            return
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


@dataclass(slots=True, eq=False)
class _Waiter:
    request: AdmissionRequest
    attempt: Attempt
    answer: "asyncio.Future[Reservation]"
    denial: Denial | None = None


class TenantQueues:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queues: dict[str, _TenantQueue] = {}

    def has_waiting(self, tenant_id: str) -> bool:
        return tenant_id in self._queues

    def wake(self, tenant_id: str) -> None:
        tenant_queue = self._queues.get(tenant_id)
        if tenant_queue is not None:
            tenant_queue.wake.set()

    async def wait(self, request: AdmissionRequest, attempt: Attempt) -> Reservation:
        """Admitted in turn, or refused at the plan's wait bound and no later than the deadline. Raises
        ClientDisconnected when the client has gone."""
        tenant_queue = self._queues.get(request.tenant_id) or _TenantQueue()
        if len(tenant_queue.queue) >= request.plan.queue_length:
            raise _queue_full(request)
        # Only now: a queue that nobody enters is never emptied, and would hold up the tenant for ever.
        self._queues[request.tenant_id] = tenant_queue
        answer: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(request, attempt, answer)
        ticket = tenant_queue.queue.push(request.key_id, 1, request.queue_cost, waiter)
        metrics.limit_queue.inc()
        metrics.limit_queue_position.observe(tenant_queue.queue.position(ticket))
        started = self._clock.monotonic()
        tenant_queue.start(lambda: self._queues.pop(request.tenant_id, None))
        request.watch_disconnect(answer)
        bound = request.wait_bound_s
        try:
            await asyncio.wait((answer,), timeout=bound)
            if answer.cancelled():
                raise ClientDisconnected
            if answer.done():
                return answer.result()
            raise _queue_timeout(waiter, bound)
        except asyncio.CancelledError:
            await _release_result(answer)
            raise
        finally:
            answer.cancel()
            tenant_queue.queue.remove(ticket)
            tenant_queue.wake.set()
            metrics.limit_queue.dec()
            waited = self._clock.monotonic() - started
            metrics.limit_queue_seconds.labels(_wait_reason(waiter)).observe(waited)


class _TenantQueue:
    def __init__(self) -> None:
        self.queue: FairQueue[_Waiter] = FairQueue()
        self.wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, on_empty: Callable[[], object]) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(on_empty))

    async def _run(self, on_empty: Callable[[], object]) -> None:
        while len(self.queue):
            self.wake.clear()
            pause = await self._retry_waiting()
            if not len(self.queue):
                break
            try:
                await asyncio.wait_for(self.wake.wait(), pause)
            except TimeoutError:
                continue
        on_empty()

    async def _retry_waiting(self) -> float:
        """Try the head of every flow once. Returns the seconds until the next round."""
        pause = _POLL_S
        for ticket in self.queue.heads():
            waiter = ticket.item
            if waiter.answer.done():
                self.queue.remove(ticket)
                continue
            try:
                result = await waiter.attempt(waiter.request)
            except Exception as error:  # a fault too: this task serves the tenant's other requests
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
                await _release(result)
            else:
                waiter.answer.set_result(result)
        return pause


async def _release_result(answer: "asyncio.Future[Reservation]") -> None:
    if answer.done() and not answer.cancelled() and answer.exception() is None:
        await _release(answer.result())


async def _release(reservation: Reservation) -> None:
    bucket_request = reservation.planned.bucket_request
    await reservation.counters.settle(
        bucket_request.group, bucket_request.id, [0] * len(bucket_request.takes), 0
    )


def _wait_reason(waiter: _Waiter) -> str:
    """The first limit that refused the request, or `turn`."""
    return waiter.denial.keys[0].rpartition(":")[0] if waiter.denial else "turn"


def _queue_full(request: AdmissionRequest) -> OverLimit:
    return OverLimit(
        f"The plan's queue of {request.plan.queue_length} waiting requests is full.",
        next_step="Retry after the time in the retry-after header.",
        code="queue_full",
        retry_after_s=request.plan.queue_wait_s or 1.0,
    )


def _queue_timeout(waiter: _Waiter, bound_s: float) -> OverLimit:
    if waiter.denial is not None:
        error = over_limit_error(waiter.denial, _POLL_S)
        error.reason = "queue_timeout"
        return error
    return OverLimit(
        f"The request waited {bound_s:g} s in the plan's queue without being admitted.",
        next_step="Retry after the time in the retry-after header.",
        code="queue_timeout",
        retry_after_s=1.0,
    )
