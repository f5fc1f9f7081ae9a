"""The response of a request: the delivery of its generation, or an error, with their headers."""

import logging
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, partial
from typing import Protocol

import orjson
from msgspec.structs import replace
from prometheus_client import Counter, Histogram

from core import metrics
from core.clock import Clock
from core.errors import TollhouseError
from core.events import UsageEvent
from gateway.admission.rejections import Rejection, RejectionCounter
from gateway.admission.request import LimitState
from gateway.answers.deadlines import Deadlines
from gateway.answers.delivery import Delivery
from gateway.answers.surface import ResponseInfo, Surface
from gateway.edge.auth.authenticator import Authenticator
from gateway.edge.decoding import nested_too_deeply
from gateway.engines.ports.port import APPROXIMATED_HEADER
from gateway.engines.routing.fallbacks import CANARY_HEADER, VIRTUAL_HEADER, fallback_headers
from gateway.metering.meter import Meter
from gateway.prompts.prompt import TRUNCATION_HEADER, Prompt
from gateway.request.exchange import ClientDisconnected, Exchange, Headers
from gateway.request.inference import InferenceRequest
from gateway.screening.moderator import Moderator
from gateway.screening.prompt_texts import continued_text
from gateway.serving.context import RequestContext
from gateway.serving.headers import error_headers, limit_headers, response_headers
from gateway.serving.request_log.log import RequestLog
from gateway.serving.response_cache.cache import HEADER as CACHE_HEADER
from gateway.serving.response_cache.replay import delivery_of
from gateway.serving.stored_responses.completions import StoredCompletions

log = logging.getLogger("tollhouse.pipeline")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    max_body: int  # bytes
    timeout_s: float  # upper bound on a request's duration
    keep_alive_s: float = 10.0  # idle time after which a stream gets a keep-alive comment
    force_usage: bool = False  # every stream ends with its usage

    def asked(self, request: InferenceRequest) -> InferenceRequest:
        """The request as it is served."""
        if not self.force_usage or not request.stream or request.include_usage:
            return request
        return replace(request, include_usage=True)


@dataclass(kw_only=True)
class Responses:
    moderator: Moderator
    rejections: RejectionCounter
    clock: Clock
    request_log: RequestLog
    completions: StoredCompletions
    deadlines: Deadlines = field(default_factory=Deadlines)

    def delivery(self, ctx: RequestContext, meter: Meter, keep_alive_s: float) -> Delivery:
        assert ctx.reservation is not None
        request, now = ctx.prompt.request, self.clock.now()
        extra = self._extra_headers(ctx, now)
        if "store" in request.extra:
            self.completions.watch(ctx)
        kind = Delivery if ctx.lookup is None else delivery_of(ctx, ctx.lookup)
        delivery = kind(
            ctx.surface,
            ctx.exchange,
            request,
            self._info(ctx, now),
            guards=lambda: self.moderator.guard(
                ctx.request_id, ctx.principal, request.choices, partial(continued_text, request)
            ),
            meter=meter,
            reservation=ctx.reservation,
            headers=lambda: response_headers(
                ctx.request_id, self._elapsed_ms(ctx), _with_notes(extra, meter)
            ),
            keep_alive_s=keep_alive_s,
            deadlines=self.deadlines,
            # The lines of a batch wait, or run again: their runner sees to their key and to a drain.
            owner=ctx.principal if ctx.exchange.batch_job is None else None,
        )
        if self.request_log.view.sinks:
            self.request_log.watch(ctx, delivery)
        return delivery

    async def send_error(self, ctx: RequestContext, failure: Exception) -> int:
        """The status; 499 when the client has gone or already has a part of an answer."""
        error = _as_shown(failure, ctx.request_id)
        if ctx.exchange.started or ctx.exchange.disconnected:
            return 499
        self.rejections.count(error, ctx.tenant_id)
        ctx.trace.set_error(error)
        extra = error_headers(error)
        extra += limit_headers(ctx.surface.style, _limits(ctx, error), None, self.clock.now())
        headers = response_headers(ctx.request_id, self._elapsed_ms(ctx), extra)
        body = orjson.dumps(ctx.surface.error(error, ctx.request_id))
        try:
            await ctx.exchange.answer(int(error.status), headers, body)
        except ClientDisconnected:
            return 499
        return int(error.status)

    def count(self, ctx: RequestContext, status: int) -> None:
        if self.request_log.view.sinks:
            self.request_log.record(ctx, status)
        _request_counter(ctx.surface.route, status).inc()
        _duration_histogram(ctx.surface.route).observe(self.clock.monotonic() - ctx.started)

    def _info(self, ctx: RequestContext, now: datetime) -> ResponseInfo:
        return ResponseInfo(
            ctx.request_id,
            int(now.timestamp()),
            ctx.target.public_name,
            ctx.target.model.codec,
            len(ctx.prompt.ids),
            _prompts(ctx.prompt),
        )

    def _extra_headers(self, ctx: RequestContext, now: datetime) -> Headers:
        assert ctx.reservation is not None and ctx.screening is not None
        extra = limit_headers(ctx.surface.style, ctx.reservation.limits(), ctx.principal.plan, now)
        if ctx.screening.headers:
            extra += ctx.screening.headers
        if ctx.prompt.headers:
            extra += ctx.prompt.header_list()
        if ctx.lookup is not None:
            extra.append((CACHE_HEADER, ctx.lookup.note.encode()))
        if ctx.canary_of:
            moved = f"{ctx.canary_of} -> {(*ctx.fallback_from, ctx.target.model.name)[0]}"
            extra.append((CANARY_HEADER.encode(), moved.encode("ascii", "replace")))
        if ctx.virtual:
            moved = f"{ctx.virtual} -> {(*ctx.fallback_from, ctx.target.model.name)[0]}"
            extra.append((VIRTUAL_HEADER.encode(), moved.encode("ascii", "replace")))
        return extra + fallback_headers(ctx)

    def _elapsed_ms(self, ctx: RequestContext) -> int:
        return round((self.clock.monotonic() - ctx.started) * 1000)


def _prompts(prompt: Prompt) -> list[list[int]]:
    if not prompt.request.return_token_ids:
        return []
    return [part.ids for part in prompt.parts] or [prompt.ids]


def _with_notes(headers: Headers, meter: Meter) -> Headers:
    """What an upstream was sent only approximately, and what the engine dropped."""
    headers = _with_dropped(headers, meter.event)
    if not meter.approximated:
        return headers
    said = " ".join(meter.approximated).encode("ascii", "replace")
    return [*headers, (APPROXIMATED_HEADER.encode(), said)]


def _with_dropped(headers: Headers, event: UsageEvent | None) -> Headers:
    """What the engine dropped is known at the end of an answer alone."""
    if event is None or not event.truncated:
        return headers
    name = TRUNCATION_HEADER.encode()
    return [*(each for each in headers if each[0] != name), (name, event.truncated.encode())]


def _limits(ctx: RequestContext, error: TollhouseError) -> LimitState:
    if isinstance(error, Rejection) and error.buckets:
        return LimitState.of(error.buckets)
    return ctx.reservation.limits() if ctx.reservation is not None else LimitState()


def _as_shown(failure: Exception, request_id: str) -> TollhouseError:
    """The error for the client. One that is not expected here is logged, and not shown."""
    if isinstance(failure, TollhouseError):
        return failure
    if isinstance(failure, RecursionError):  # the body parsed, but a later step recursed too deeply
        return nested_too_deeply()
    log.error("unhandled error in the request pipeline", exc_info=failure)
    return TollhouseError(
        "The gateway failed to process this request.",
        next_step=f"Report request id {request_id} to the operator.",
    )


@cache
def _request_counter(route: str, status: int) -> Counter:
    return metrics.requests.labels(route, str(status))


@cache
def _duration_histogram(route: str) -> Histogram:
    return metrics.request_seconds.labels(route)


class Server(Protocol):
    @property
    def auth(self) -> Authenticator: ...

    @property
    def limits(self) -> RequestLimits: ...

    async def serve(self, surface: Surface, exchange: Exchange) -> None: ...
