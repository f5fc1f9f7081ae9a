"""One engine as the router knows it: its client, its breaker, and what was measured of it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from core import metrics
from core.clock import Clock
from engine.protocol import AdapterState, EngineStats, Receipt
from gateway.engines.base import EngineClient, Generation
from gateway.routing.breaker import Breaker, State
from gateway.routing.placement import Replica

log = logging.getLogger("tollhouse.routing")
_LEARN = 0.1
_LEAST_TOKENS = 64  # a shorter prompt says more of the step's overhead than of its speed


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that was sent to a replica and has no first token from there yet."""

    generation: Generation
    since: float  # monotonic
    expected_s: float  # to its first token
    whole: bool  # nothing comes before the whole answer


class Place:
    """Its name outlives the process that serves there."""

    def __init__(self, client: EngineClient, clock: Clock) -> None:
        self.client = client
        self.name = client.engine_id
        self.breaker = Breaker(clock)
        self.draining = False  # by an operator's word: what runs ends, nothing new comes
        self.prefill_tokens_s = 0.0  # 0: not measured yet
        self._measured = 0
        self.adapter_load_s = 0.3
        self.under_way = 0
        self.silent = False  # owes a sign of life
        self.waiting: dict[object, Waiting] = {}  # by route
        self._pending = 0  # prompt tokens of ours that have not given their first token
        self._others = 0  # that waited there besides ours when the stats were taken
        self._stats: EngineStats | None = None
        self._gauge = metrics.breaker_open.labels(self.name)
        self._gauge.set(0)

    def serves(self) -> bool:
        return not self.draining and self.client.healthy() and self.breaker.allows()

    def state(self) -> str:
        if self.draining:
            return "drained"
        if not self.client.healthy():
            return "loading" if self.client.coming() is not None else "away"
        if self.silent:
            return "silent"
        return "ready" if self.breaker.state is State.CLOSED else f"breaker {self.breaker.state}"

    def seen(self, *, sticky: bool, held_blocks: int, usual_rate: float) -> Replica:
        """`usual_rate` (tokens a second) is taken of one that was not measured yet."""
        info, stats = self.client.info(), self.client.stats()
        if stats is not self._stats:
            self._stats = stats
            self._others = max(0, stats.tokens_waiting - self._pending) if stats else 0
        return Replica(
            self.name,
            stats,
            info.block_size if info is not None else 16,
            self.prefill_tokens_s or usual_rate,
            self.adapter_load_s,
            self._pending + self._others - (stats.tokens_waiting if stats else 0),
            held_blocks,
            self.under_way,
            sticky=sticky,
            adapters=self.client.adapters(),
        )

    def process(self) -> str:
        """Another one after a restart, where the engine tells."""
        info = self.client.info()
        return info.engine_id if info is not None else ""

    def has(self, digest: str) -> bool:
        """Whether it knows the adapter; one that it read before may still have to load."""
        known: Mapping[str, AdapterState] = self.client.adapters()
        return digest in known

    def sent(self, tokens: int) -> None:
        """`tokens` are those of the prompt that its cache does not hold."""
        self.under_way += 1
        self._pending += tokens
        self.breaker.sent()

    def begun(self, tokens: int) -> None:
        """The request that was sent with so many has its first token, or is over without one."""
        self._pending -= tokens

    def answered(self) -> None:
        """It gave a first token."""
        if self.breaker.state is not State.CLOSED:
            log.info("%s answers again", self.name)
            self._gauge.set(0)
        self.breaker.succeeded()

    def failed(self, why: str) -> None:
        self._open(self.breaker.failed, why)

    def _open(self, note: Callable[[], None], why: str) -> None:
        was = self.breaker.state
        note()
        if self.breaker.state is State.OPEN and was is not State.OPEN:
            metrics.breaker_openings.labels(self.name).inc()
            self._gauge.set(1)
            log.warning("%s is left alone for a while: %s", self.name, why)

    def hangs(self, why: str) -> None:
        self._open(self.breaker.trip, why)

    def ended(self, receipt: Receipt | None) -> None:
        """The request is over there, however it went."""
        self.under_way -= 1
        self.breaker.released()
        if receipt is not None and receipt.computed >= _LEAST_TOKENS and receipt.prefill_s > 0:
            rate = receipt.computed / receipt.prefill_s
            self._measured += 1
            learn = max(_LEARN, 1 / self._measured)
            self.prefill_tokens_s += learn * (rate - self.prefill_tokens_s)

    def adapter_took(self, seconds: float) -> None:
        self.adapter_load_s += _LEARN * (seconds - self.adapter_load_s)
