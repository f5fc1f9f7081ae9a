"""Queues of requests over a limit: one per tenant, bounded, fair between its keys.

A queue retries the head of each flow in fair order when a request of the tenant ends, when a bucket
should have refilled, and at least every second, because other processes return capacity too.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from core import metrics
from core.clock import Clock
from core.counters import Denial
from core.errors import TollhouseError
from gateway.admission.fair_queue import FairQueue
from gateway.admission.rejections import OverLimit, over_limit_error
from gateway.admission.request import AdmissionRequest
from gateway.admission.reservation import Reservation
from gateway.http.exchange import ClientDisconnected

Attempt = Callable[[AdmissionRequest], Awaitable[Reservation | Denial]]
_POLL_S = 1.0


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
        tenant_queue = self._queues.get(request.tenant_id)
        if tenant_queue is None:
            tenant_queue = self._queues[request.tenant_id] = _TenantQueue()
        if len(tenant_queue.queue) >= request.plan.queue_length:
            raise _queue_full(request)
        answer: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(request, attempt, answer)
        cost = request.prompt_tokens + (request.max_output_tokens or request.plan.expected_output)
        ticket = tenant_queue.queue.push(request.key_id, 1, cost, waiter)
        metrics.limit_queue.inc()
        metrics.limit_queue_position.observe(tenant_queue.queue.position(ticket))
        started = self._clock.monotonic()
        tenant_queue.start(lambda: self._queues.pop(request.tenant_id, None))
        request.watch_disconnect(answer)
        bound = min(request.plan.queue_wait_s, request.deadline_s or request.plan.queue_wait_s)
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
