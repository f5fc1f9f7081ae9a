"""Sends records of requests to the sinks of tenants: from memory, in batches, without a promise.

A record is dropped, and counted, when its tenant's queue is full or its receiver fails five times in
a row. A slow receiver delays its own tenant's records only, and never a request.
"""

import asyncio
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from billing.notices.request_sinks import Sink, SinkView
from core import metrics
from core.clock import Clock
from gateway.serving.request_log.receivers import Receivers, record_of

if TYPE_CHECKING:
    from gateway.answers.delivery import Delivery
    from gateway.serving.context import RequestContext

log = logging.getLogger("tollhouse.request_log")
MOST_WAITING = 1_000  # records of one tenant
MOST_BYTES = 32 * 2**20  # of all tenants, roughly
_BATCH = 50
# A bucket gets few larger objects: each costs a request, and readers open them one by one.
_BATCH_OF_OBJECT = 500
_OBJECT_S = 10.0
_SEND_S = 0.3
_ATTEMPTS = 5
_THREADS = 4  # receivers served at once
_LAST_S = 3.0  # for what waits when the process stops
_BYTES_OF_TOKEN = 8
_OVERHEAD = 2_000


@dataclass(eq=False)
class _Queue:
    """The records of one tenant that wait, with their sizes."""

    since: float  # monotonic: when the first record came after the queue was empty
    records: deque[tuple[dict[str, Any], int]] = field(default_factory=lambda: deque())
    failures: int = 0
    next_at: float = 0.0  # monotonic
    sending: bool = False


class RequestLog:
    def __init__(
        self, view: SinkView, clock: Clock, receivers: Receivers, most_bytes: int = MOST_BYTES
    ) -> None:
        self.view = view
        self._clock = clock
        self._receivers = receivers
        self._most_bytes = most_bytes
        self._queues: dict[str, _Queue] = {}
        self._bytes = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="request-log")
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, ctx: "RequestContext", delivery: "Delivery") -> None:
        """Keep the delivery of a request whose answer is to be recorded."""
        sink = self.view.sinks.get(ctx.principal.tenant_id)
        if sink is not None and sink.content and sink.takes(ctx.request_id):
            ctx.delivery = delivery

    def record(self, ctx: "RequestContext", status: int) -> None:
        """Never raises, and never waits."""
        tenant_id = ctx.tenant_id
        sink = self.view.sinks.get(tenant_id) if tenant_id is not None else None
        if sink is None or tenant_id is None or not sink.takes(ctx.request_id):
            return
        try:
            record = record_of(ctx, status, content=sink.content)
        except Exception:
            log.exception("the record of %s could not be made", ctx.request_id)
            metrics.request_log.labels("dropped").inc()
            return
        tokens = record.get("input_tokens", 0) + record.get("output_tokens", 0)
        size = _OVERHEAD + (_BYTES_OF_TOKEN * tokens if sink.content else 0)
        queue = self._queues.get(tenant_id)
        if queue is None:
            queue = self._queues[tenant_id] = _Queue(self._clock.monotonic())
        if len(queue.records) >= MOST_WAITING or self._bytes + size > self._most_bytes:
            metrics.request_log.labels("dropped").inc()
            return
        self._bytes += size
        queue.records.append((record, size))

    async def run(self) -> None:
        """Sends until cancelled."""
        while True:
            await asyncio.sleep(_SEND_S)
            self._send_due()

    async def close(self) -> None:
        """Sends what waits, for a few seconds, and drops the rest."""
        deadline = self._clock.monotonic() + _LAST_S
        while self._queues and self._clock.monotonic() < deadline:
            self._send_due(closing=True)
            await asyncio.sleep(0.05)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _send_due(self, *, closing: bool = False) -> None:
        now = self._clock.monotonic()
        for tenant_id, queue in list(self._queues.items()):
            sink = self.view.sinks.get(tenant_id)
            if sink is None:
                if not queue.sending:
                    self._drop(queue, len(queue.records))
                    del self._queues[tenant_id]
                continue
            if not queue.records:
                if not queue.sending:
                    del self._queues[tenant_id]
                continue
            gathers = sink.is_bucket and len(queue.records) < _BATCH_OF_OBJECT
            if gathers and not closing and now < queue.since + _OBJECT_S:
                continue
            if not queue.sending and queue.next_at <= now:
                queue.sending = True
                task = asyncio.create_task(self._send(tenant_id, queue, sink))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _send(self, tenant_id: str, queue: _Queue, sink: Sink) -> None:
        most = _BATCH_OF_OBJECT if sink.is_bucket else _BATCH
        batch = [record for record, _ in islice(queue.records, most)]
        loop = asyncio.get_running_loop()
        try:
            problem = await loop.run_in_executor(
                self._threads,
                self._receivers.deliver,
                *(tenant_id, sink, batch, self._clock.now()),
            )
        except RuntimeError:  # the process stops
            problem = "the gateway stops"
        queue.sending = False
        if not problem:
            self._remove(queue, len(batch))
            queue.failures, queue.since = 0, self._clock.monotonic()
            metrics.request_log.labels("sent").inc(len(batch))
            return
        queue.failures += 1
        queue.next_at = self._clock.monotonic() + 2.0 ** (queue.failures - 1)
        if queue.failures >= _ATTEMPTS:
            log.warning("records of requests of %s are dropped: %s", tenant_id, problem)
            self._drop(queue, len(batch))
            queue.failures = 0

    def _remove(self, queue: _Queue, count: int) -> None:
        for _ in range(min(count, len(queue.records))):
            self._bytes -= queue.records.popleft()[1]

    def _drop(self, queue: _Queue, count: int) -> None:
        if count:
            metrics.request_log.labels("dropped").inc(count)
        self._remove(queue, count)
