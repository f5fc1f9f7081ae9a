"""A replica: an engine's client, its circuit breaker, and measurements of its speed."""

import logging
from collections.abc import Callable, Mapping

from msgspec import Struct

from core import metrics
from core.clock import Clock
from engine.protocol import AdapterState, EngineStats, Receipt
from gateway.engines.routing.breaker import Breaker, State
from gateway.engines.routing.placement import ReplicaSnapshot
from gateway.engines.routing.tenant_breakers import TenantBreakers
from gateway.request.engine import EngineClient, Generation

log = logging.getLogger("tollhouse.routing")
_SMOOTHING = 0.1
_MIN_TOKENS = 64  # shorter prompts measure the overhead of a step rather than its speed


class WaitingRequest(Struct, frozen=True):
    """A request that was sent to a replica and has no first token yet."""

    generation: Generation
    since: float  # monotonic time
    expected_s: float  # seconds to the first token
    whole: bool  # not streamed: no output before the complete answer


class Replica:
    """One replica of a model. Its name stays the same when its process restarts."""

    def __init__(self, client: EngineClient, clock: Clock) -> None:
        self.client = client
        self.name = client.engine_id
        self.breaker = Breaker(clock)
        self._by_tenant = TenantBreakers(clock)
        self.draining = False  # set by the operator: running requests finish, no new ones are sent
        self.prefill_tokens_s = 0.0  # tokens per second; 0: not measured yet
        self._measured = 0
        self.adapter_load_s = 0.3
        self.under_way = 0
        self.silent = False  # its heartbeat is overdue
        self.waiting: dict[object, WaitingRequest] = {}  # by route
        self._pending = 0  # prompt tokens of this process's requests without a first token
        self._queued_elsewhere = (
            0  # prompt tokens of other processes that were queued in the last stats
        )
        self._stats: EngineStats | None = None
        metrics.lost_with_engine.labels(self.name)  # from 0 on, or its first increase is not seen
        self._gauge = metrics.breaker_open.labels(self.name)
        self._gauge.set(0)

    def serves(self, tenant: str = "") -> bool:
        if self.draining or not self.client.healthy():
            return False
        return self.breaker.allows() and self._by_tenant.allows(tenant)

    def retry_after_s(self, tenant: str) -> float:
        return max(self.breaker.retry_after_s(), self._by_tenant.retry_after_s(tenant))

    def state(self) -> str:
        if self.draining:
            return "drained"
        if not self.client.healthy():
            if self.client.refusal:
                return "refused"
            return "loading" if self.client.startup_progress() is not None else "away"
        if self.silent:
            return "silent"
        return "ready" if self.breaker.state is State.CLOSED else f"breaker {self.breaker.state}"

    def snapshot(self, *, sticky: bool, held_blocks: int, default_rate: float) -> ReplicaSnapshot:
        """A snapshot. `default_rate` is the prefill speed to assume if none was measured (tokens/s)."""
        info, stats = self.client.info(), self.client.stats()
        if stats is not self._stats:
            self._stats = stats
            self._queued_elsewhere = max(0, stats.tokens_waiting - self._pending) if stats else 0
        return ReplicaSnapshot(
            self.name,
            stats,
            info.block_size if info is not None else 16,
            self.prefill_tokens_s or default_rate,
            self.adapter_load_s,
            self._pending + self._queued_elsewhere - (stats.tokens_waiting if stats else 0),
            held_blocks,
            self.under_way,
            sticky=sticky,
            adapters=self.client.adapters(),
        )

    def process(self) -> str:
        """The id of the engine process, which changes at a restart; empty if it is not known."""
        info = self.client.info()
        return info.engine_id if info is not None else ""

    def has(self, digest: str) -> bool:
        """Whether the adapter is registered there; it may still have to be loaded to the device."""
        known: Mapping[str, AdapterState] = self.client.adapters()
        return digest in known

    def sent(self, tokens: int, tenant: str = "") -> None:
        """A request was sent; `tokens` is the number of its prompt tokens that are not cached."""
        self.under_way += 1
        self._pending += tokens
        self.breaker.sent()
        self._by_tenant.sent(tenant)

    def first_token(self, tokens: int) -> None:
        """A request that was sent with `tokens` has its first token, or ended without one."""
        self._pending -= tokens

    def answered(self, tenant: str = "") -> None:
        """The replica produced a first token."""
        self._by_tenant.succeeded(tenant)
        if self.breaker.succeeded():
            log.info("%s answers again", self.name)
            self._gauge.set(0)

    def failed(self, why: str) -> None:
        self._open(self.breaker.failed, why)

    def failed_for(self, tenant: str, why: str) -> None:
        """It answered with an error, for which the tenant's request may have been the cause."""
        if self._by_tenant.failed(tenant):
            self._open(self.breaker.trip, why)

    def _open(self, note: Callable[[], None], why: str) -> None:
        state_before = self.breaker.state
        note()
        if self.breaker.state is State.OPEN and state_before is not State.OPEN:
            metrics.breaker_openings.labels(self.name).inc()
            self._gauge.set(1)
            log.warning("%s: circuit breaker opened: %s", self.name, why)

    def mark_hung(self, why: str) -> None:
        self._open(self.breaker.trip, why)

    def ended(self, receipt: Receipt | None, tenant: str = "") -> None:
        """A request has ended on the replica, with any outcome."""
        self.under_way -= 1
        self.breaker.released()
        self._by_tenant.released(tenant)
        if receipt is not None and receipt.computed >= _MIN_TOKENS and receipt.prefill_s > 0:
            rate = receipt.computed / receipt.prefill_s
            self._measured += 1
            weight = max(_SMOOTHING, 1 / self._measured)
            self.prefill_tokens_s += weight * (rate - self.prefill_tokens_s)

    def record_adapter_load(self, seconds: float) -> None:
        self.adapter_load_s += _SMOOTHING * (seconds - self.adapter_load_s)
