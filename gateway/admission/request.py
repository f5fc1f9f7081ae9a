"""The records of admission: the size of a request before it runs, and its usage afterwards."""

import asyncio
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Protocol

from msgspec import Struct

from billing.pricing.pricing import Counts, PriceVersion
from core.counters import BucketState, Take
from core.events import UsageEvent
from core.tenants.keys import Principal
from core.tenants.plans import Plan
from gateway.catalog.catalog import Target
from gateway.request.exchange import Exchange
from gateway.request.inference import InferenceRequest

_quantity_of = itemgetter(1)
TIMED_OUT = "deadline_exceeded"  # the finish reason of a request whose time was over
# Calls its argument once when the client disconnects.
DisconnectWatch = Callable[[Callable[[], None]], None]


class MoneyLimit(Struct, frozen=True):
    """A budget or a prepaid balance. The key names its period too: `budget_x:2026-11`."""

    key: str
    cap_units: int  # picounits that may be spent in total
    spent_units: int  # picounits that billing has recorded as spent


class AdmissionRequest(Struct, frozen=True):
    """The size and owner of a request before it runs. Admission adds the money."""

    request_id: str
    tenant_id: str
    project_id: str
    key_id: str  # of the first key of a chain of rotations, to which limits are attached
    model: str
    plan: Plan  # with the tenant's own rules in it: `core.tenants.plans.with_rules`
    prompt_tokens: int
    max_output_tokens: int | None = None  # of one choice
    money: tuple[MoneyLimit, ...] = ()
    base_cost_units: int = 0  # picounits of request and uncached prompt, at the pinned price
    output_cost_units: int = 0  # picounits of one output token, in the most expensive tier
    currency: str = "USD"  # in which the tenant is billed
    choices: int = 1  # answers that are delivered
    candidates: int = 0  # answers that are generated, where they are more than `choices`
    deadline_s: float | None = None  # seconds left, which bound the wait in a queue
    adapter: str | None = None
    on_disconnect: DisconnectWatch | None = None  # ends the wait in a queue
    # The most that it may cost in addition to prompt and output tokens, by component.
    bound: Counts | None = None
    tier: str | None = None  # the service tier, whose price is another
    # Whether `max_output_tokens` is a bound that somebody chose, and not the rest of a context.
    is_bounded: bool = True
    labels: str | None = None  # in their canonical form

    @classmethod
    def without_prompt(
        cls, request_id: str, principal: Principal, model: str
    ) -> "AdmissionRequest":
        """Of a request whose prompt is not encoded: for limits on requests alone."""
        return cls(
            request_id=request_id,
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            key_id=principal.origin_id,
            model=model,
            plan=principal.plan,
            prompt_tokens=0,
        )

    @property
    def generated_choices(self) -> int:
        return self.candidates if self.candidates > self.choices else self.choices

    def estimated_output(self, expected: int) -> int:
        """Output tokens to reserve, where `expected` is usual for one choice. Of several answers, each
        may be as long as the request allows."""
        if self.candidates > 1 or self.choices > 1:
            return self.worst_output(expected)
        most = self.max_output_tokens
        return most if most and most < expected else expected

    def worst_output(self, expected: int) -> int:
        """The most output tokens that it may generate; where it states no bound, what is usual."""
        most = self.max_output_tokens or expected
        if not self.is_bounded and most > expected:
            most = expected
        return most if self.candidates <= 1 and self.choices == 1 else most * self.generated_choices

    @property
    def queue_cost(self) -> int:
        """Tokens by which a queue orders the requests of several keys."""
        return self.prompt_tokens + (self.max_output_tokens or self.plan.expected_output)

    @property
    def wait_bound_s(self) -> float:
        """The longest wait in a queue: the plan's, and no longer than the deadline."""
        return min(self.plan.queue_wait_s, self.deadline_s or self.plan.queue_wait_s)

    def watch_disconnect(self, waiting: "asyncio.Future[Any]") -> None:
        """Cancel `waiting` when the client disconnects."""
        if self.on_disconnect is None:
            return

        def _cancel() -> None:
            waiting.cancel()

        self.on_disconnect(_cancel)


class ServedRequest(Protocol):
    """What admission reads of a request that is being served; a service tier changes its plan."""

    principal: Principal

    @property
    def request_id(self) -> str: ...

    @property
    def request(self) -> InferenceRequest: ...

    @property
    def target(self) -> Target: ...

    @property
    def exchange(self) -> Exchange: ...

    @property
    def large(self) -> bool: ...

    @property
    def reservation(self) -> object | None: ...

    @property
    def tenant_id(self) -> str | None: ...


class SettledUsage(Struct, frozen=True):
    """What the counters keep of a request. `cost_units` is the exact charge in picounits."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_units: int = 0
    requests: int = 1  # 0 if no engine has worked for the request
    withheld_tokens: int = 0  # of candidates that were generated for the request and not delivered

    @classmethod
    def of_event(cls, event: UsageEvent, price: PriceVersion | None) -> "SettledUsage":
        """The settlement of a billed event: the counters keep what the ledger charges. `price` is
        None when no money is held."""
        counts = Counts.of_event(event)
        charged = any(map(_quantity_of, counts.by_component))
        # These are free, but not without limit: an engine has worked for them.
        charged |= event.waived_tokens > 0 or event.finish_reason == TIMED_OUT
        cost_units = price.cost(counts) if price is not None else 0
        return cls(
            event.input_tokens, event.cached_tokens, event.output_tokens, cost_units, int(charged)
        )


UNUSED = SettledUsage(0, 0, 0, requests=0)  # of a request that never reached an engine


class LimitState(Struct, frozen=True):
    """The state of the limits, for the response headers."""

    buckets: tuple[BucketState | Take, ...] = ()
    remaining: tuple[int, ...] = ()  # in each of them
    reset_ms: tuple[int, ...] = ()  # until it is full again
    mode: str = "shared"
    queued_ms: int = 0
    shadow: tuple[str, ...] = ()

    @classmethod
    def of(cls, buckets: tuple[BucketState, ...]) -> "LimitState":
        """That of a request which was refused."""
        remaining = tuple([each.remaining for each in buckets])
        return cls(buckets, remaining, tuple([each.reset_ms for each in buckets]))
