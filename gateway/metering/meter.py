"""Turns the outcome of a request into one usage event: the rules of what is billed and waived.

Output tokens that were delivered to the client are billed, and other generated tokens are waived,
so generated = billed + waived. Prompt tokens that the engine processed are billed.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache, partial
from operator import attrgetter

from msgspec import Struct, field
from msgspec.structs import replace
from prometheus_client import Counter, Histogram

from core import metrics
from core.clock import Clock
from core.events import (
    WARM_UP,
    Components,
    CountedBy,
    OpenedRequest,
    SettledBy,
    UsageEvent,
    UsageKind,
)
from engine.protocol import Receipt
from gateway.edge.threads import run_in_thread
from gateway.metering.delivered import StreamCount
from gateway.metering.order_savings import GivenOrders
from gateway.metering.spool import Spool
from gateway.metering.spool_statements import Statement
from gateway.request.receipts import UpstreamReceipt
from gateway.request.spans import NO_TRACE, Trace

_GENERATION, _CACHE_HIT = UsageKind.GENERATION, UsageKind.CACHE_HIT
_BY_GATEWAY = SettledBy.GATEWAY
_OK = 200
_CLIENT_CLOSED_REQUEST = 499  # the client closed the connection (nginx's code)


class Counts(Struct, frozen=True):
    input: int
    cached: int
    output: int
    waived: int
    components: Components | None = None  # of uncached input and output


class Ending(Struct, frozen=True):
    """What the gateway knows of a request at its end."""

    delivered: int  # tokens whose text was sent to the client; of an upstream: characters
    seen: int  # tokens that the gateway received from the engine; of an upstream: characters
    finish_reason: str
    status: int
    prompt_done: bool  # a token arrived, so the whole prompt was processed
    paid_by: str | None = None  # set if the policy blocked the prompt or stopped the answer
    quantity: int = 1  # requests to charge the fee for; 0: no fee
    units: int = 0  # seconds, characters or images to bill
    counted_by: CountedBy | None = None

    @property
    def costs_nothing(self) -> bool:
        """Whether the client got an error and nothing of an answer. What a policy blocked is paid as
        the policy says, and a client that leaves pays the prompt that was computed for it."""
        failed = self.status >= 400 and self.status != _CLIENT_CLOSED_REQUEST
        return failed and not (self.delivered or self.units) and self.paid_by is None


def blocked_ending(paid_by: str) -> Ending:
    """The ending of a blocked prompt. Its tokens and fee are billed only if the tenant pays."""
    pays = paid_by == "tenant"
    return Ending(0, 0, "content_filter", 400, pays, paid_by=paid_by, quantity=int(pays))


def refused_ending(status: int) -> Ending:
    """The ending of a request that was opened for one model and refused for the next."""
    return Ending(0, 0, "refused", status, prompt_done=False)


def counts_of(prompt_tokens: int, ending: Ending, receipt: Receipt | None) -> Counts:
    """Counts from the engine's receipt; without one, from what the gateway saw."""
    if receipt is None:
        entered = prompt_tokens if ending.prompt_done else 0
        return Counts(entered, 0, ending.delivered, max(0, ending.seen - ending.delivered))
    if isinstance(receipt, UpstreamReceipt):
        output = receipt.billed(ending.delivered, answered=ending.status == _OK)
        waived = receipt.generated - output
        return Counts(receipt.prompt, receipt.cached, output, waived, receipt.components(output))
    generated = max(receipt.generated, ending.seen)
    output = min(ending.delivered, generated)
    return Counts(receipt.prompt, receipt.cached, output, generated - output)


class MeterServices(Struct, frozen=True):
    """What the meters of a process share. `acknowledge` lets engines drop receipts, by request id."""

    spool: Spool
    clock: Clock
    acknowledge: Callable[..., None]
    given_orders: GivenOrders = field(default_factory=GivenOrders)


class Meter:
    """Meters one request, from its opened record to its usage event."""

    first_token_ms: int | None = None
    is_warm_up = False
    streamed = False
    moderation: str | None = None
    prompt_order: str | None = None
    # Tokens that the order as given would have found cached; None if prompt order changed nothing.
    cached_as_given: int | None = None
    truncated: str | None = None
    routed: str | None = None
    fallback_from: tuple[str, ...] = ()  # models that failed before this one
    canary_of = ""
    virtual = ""  # the virtual model that was asked for
    approximated: tuple[str, ...] = ()  # what the upstream was only told approximately
    event: UsageEvent | None = None

    def __init__(
        self, services: MeterServices, opened: OpenedRequest, trace: Trace = NO_TRACE
    ) -> None:
        self.opened = opened
        self._spool = services.spool
        self._clock = services.clock
        self._started = services.clock.monotonic()
        self._acknowledge = services.acknowledge
        self._trace = trace

    async def write_opened(self, *, again: bool = False) -> None:
        await (self._spool.reopen(self.opened) if again else self._spool.open(self.opened))

    async def rerouted(self, engine_id: str) -> None:
        """Note that another engine runs the request, so that recovery asks it for the receipt."""
        self.opened = replace(self.opened, engine_id=engine_id)
        await self._spool.reopen(self.opened)

    def _route_note(self) -> str | None:
        if not (self.fallback_from or self.canary_of or self.virtual):
            return self.routed
        virtual = f"of {self.virtual}; " if self.virtual else ""
        canary = f"canary of {self.canary_of}; " if self.canary_of else ""
        failed = f"fallback from {', '.join(self.fallback_from)}; " if self.fallback_from else ""
        return f"{virtual}{canary}{failed}{self.routed or ''}"[:120]

    def begin_stream(self) -> StreamCount | None:
        return self._spool.begin_stream(self.opened.request_id)

    def first_token(self) -> None:
        if self.first_token_ms is None:
            seconds = self._clock.monotonic() - self._started
            self.first_token_ms = round(seconds * 1000)
            _first_token(self.opened.model).observe(seconds)

    def draft(self, ending: Ending, receipt: Receipt | None) -> UsageEvent:
        """The event that `close` writes, for what has to be made of it before."""
        return self.event or self._event(ending, receipt)

    async def close(
        self,
        ending: Ending,
        receipt: Receipt | None,
        extra_statements: Callable[[UsageEvent], Sequence[Statement]] | None = None,
        *,
        draft: UsageEvent | None = None,
    ) -> UsageEvent:
        """Write the closed record. It is durable on return, unless the disk refuses it: then the
        engine keeps its receipt until it is. Only the first call counts. `extra_statements` returns
        statements for the same commit; `draft` is the event if it is made already."""
        event = self.event or draft or self._event(ending, receipt)
        statements: Sequence[Statement] = ()
        if self.event is None and extra_statements is not None:
            statements = await run_in_thread(partial(extra_statements, event))
        if self.event is not None:
            return self.event
        self.event = event
        self._trace.set_usage(event)
        with self._trace.span("metering"):
            await self._spool.close(event, self._release(receipt), statements)
        _count(event)
        return event

    def close_soon(self, ending: Ending, receipt: Receipt | None) -> None:
        """As `close`, without waiting, for a cancelled request: durable at the next flush."""
        if self.event is None:
            self.event = self._event(ending, receipt)
            self._trace.set_usage(self.event)
            self._spool.close_soon(self.event, self._release(receipt))
            _count(self.event)

    def _release(self, receipt: Receipt | None) -> Callable[[], None] | None:
        """The acknowledgement that lets the engine drop the receipt; call it once the record is
        durable. With several prompts, some may have a receipt although the request has none."""
        if receipt is None and self.opened.prompts == 1:
            return None
        return partial(self._acknowledge, *self.opened.engine_request_ids)

    def _event(self, ending: Ending, receipt: Receipt | None) -> UsageEvent:
        counts = counts_of(self.opened.prompt_tokens, ending, receipt)
        if self.opened.batch_job is not None and ending.status == _CLIENT_CLOSED_REQUEST:
            counts, ending = waive_all(counts), replace(ending, paid_by="operator", quantity=0)
        elif ending.costs_nothing:
            payer = "operator" if ending.status >= 500 else None
            counts, ending = waive_all(counts), replace(ending, paid_by=payer, quantity=0)
        if self.opened.kind is _CACHE_HIT:
            counts = Counts(0, 0, 0, 0)  # no engine ran
        if self.is_warm_up:
            counts = Counts(0, 0, 0, 0)
            ending = replace(ending, finish_reason=WARM_UP, paid_by="operator", quantity=0)
        duration_ms = round((self._clock.monotonic() - self._started) * 1000)
        outcome = Outcome(
            finished_at=self._clock.now(),
            finish_reason=ending.finish_reason,
            status=ending.status,
            settled_by=_BY_GATEWAY,
            streamed=self.streamed,
            first_token_ms=self.first_token_ms,
            duration_ms=duration_ms,
            queue_ms=round(receipt.queue_s * 1000) if receipt else 0,
            moderation=self.moderation,
            prompt_order=self.prompt_order,
            reordered_cached_tokens=(
                max(0, counts.cached - self.cached_as_given)
                if self.cached_as_given is not None
                else 0
            ),
            truncated=with_dropped(self.truncated, receipt),
            routed=self._route_note(),
            paid_by=ending.paid_by,
            quantity=ending.quantity,
            units=ending.units,
            counted_by=counted_by(ending, receipt),
            busy_us=receipt.busy_us if receipt else 0,
        )
        return usage_event(self.opened, counts, outcome)


def with_dropped(truncated: str | None, receipt: Receipt | None) -> str | None:
    """What was dropped before the engine, and the tokens that its window left out."""
    if receipt is None or not receipt.dropped:
        return truncated
    note = f"tokens={receipt.dropped}"
    return f"{truncated}, {note}" if truncated else note


def counted_by(ending: Ending, receipt: Receipt | None) -> CountedBy | None:
    if isinstance(receipt, UpstreamReceipt):
        return receipt.counted_by
    if receipt is None and ending.counted_by is CountedBy.ENGINE:
        return CountedBy.GATEWAY
    return ending.counted_by


def waive_all(counts: Counts) -> Counts:
    """Waive everything: of a request that failed, or of an unanswered line of a batch, which runs
    again."""
    return Counts(0, 0, 0, counts.output + counts.waived)


class Outcome(Struct, frozen=True):
    """How a request ended, for its usage event; the fields are those of `UsageEvent`."""

    finished_at: datetime
    finish_reason: str
    status: int
    settled_by: SettledBy
    streamed: bool = False
    first_token_ms: int | None = None
    duration_ms: int = 0
    queue_ms: int = 0
    moderation: str | None = None
    prompt_order: str | None = None
    reordered_cached_tokens: int = 0
    truncated: str | None = None
    routed: str | None = None
    quantity: int = 1
    paid_by: str | None = None
    counted_by: CountedBy | None = None
    busy_us: int = 0
    units: int = 0


def usage_event(opened: OpenedRequest, counts: Counts, outcome: Outcome) -> UsageEvent:
    return UsageEvent(
        request_id=opened.request_id,
        tenant_id=opened.tenant_id,
        project_id=opened.project_id,
        key_id=opened.key_id,
        kind=opened.kind,
        route=opened.route,
        model=opened.model,
        adapter=opened.adapter,
        adapter_digest=opened.adapter_digest,
        price_version=opened.price_version,
        occurred_at=opened.opened_at,
        finished_at=outcome.finished_at,
        input_tokens=counts.input,
        cached_tokens=counts.cached,
        output_tokens=counts.output,
        waived_tokens=counts.waived,
        finish_reason=outcome.finish_reason,
        status=outcome.status,
        settled_by=outcome.settled_by,
        streamed=outcome.streamed,
        first_token_ms=outcome.first_token_ms,
        duration_ms=outcome.duration_ms,
        queue_ms=outcome.queue_ms,
        engine_id=opened.engine_id,
        member_id=opened.member_id,
        end_user=opened.end_user,
        client_request_id=opened.client_request_id,
        moderation=outcome.moderation,
        prompt_order=outcome.prompt_order,
        reordered_cached_tokens=outcome.reordered_cached_tokens,
        truncated=outcome.truncated,
        batch_job=opened.batch_job,
        routed=outcome.routed,
        quantity=outcome.quantity,
        paid_by=outcome.paid_by,
        counted_by=outcome.counted_by,
        busy_us=outcome.busy_us,
        units=outcome.units,
        components=counts.components,
        labels=opened.labels,
    )


_KINDS = ("input", "cached", "output", "waived")
_counted = attrgetter(*[f"{kind}_tokens" for kind in _KINDS])


@cache
def _tokens(model: str, kind: str) -> Counter:
    return metrics.tokens.labels(model, kind)


@cache
def _first_token(model: str) -> Histogram:
    return metrics.first_token_seconds.labels(model)


def _count(event: UsageEvent) -> None:
    for number, count in enumerate(_counted(event)):
        if count:
            _tokens(event.model, _KINDS[number]).inc(count)
