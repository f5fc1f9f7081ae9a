"""The path of an inference request, from the API key to the usage event.

auth -> request options -> prompt -> admission (limits and money) -> moderation -> routing -> engine
-> streaming, with the output guard -> metering. Every inference route is a `Surface` served by this
pipeline.
"""

import logging
from dataclasses import dataclass, field, replace
from functools import cache

import orjson
from prometheus_client import Counter, Histogram

from core import logs, metrics
from core.clock import Clock
from core.errors import TollhouseError, Unavailable
from core.events import OpenedRequest, UsageKind, engine_request_ids
from core.ids import REQUEST, new_id
from core.tenants.keys import Principal
from engine.protocol import GenerateRequest
from gateway.admission.rejections import OutOfMoney, OverLimit
from gateway.admission.request import (
    Admission,
    AdmissionRequest,
    LimitState,
    Reservation,
    SettledUsage,
)
from gateway.auth.authenticator import Authenticator
from gateway.catalog.capabilities import check_capabilities, check_sampling_parameters
from gateway.catalog.catalog import Catalog, Target
from gateway.http.exchange import ClientDisconnected, Exchange
from gateway.http.headers import (
    RequestOptions,
    error_headers,
    limit_headers,
    read_options,
    response_headers,
)
from gateway.inference.decoding import nested_too_deeply
from gateway.inference.request import InferenceRequest
from gateway.inference.surface import ResponseInfo, Surface
from gateway.metering.meter import Ending, Meter, blocked_ending
from gateway.metering.spool import Spool
from gateway.prompts.prompt import Prompt, prepare
from gateway.routing.fallbacks import HEADER as FALLBACK_HEADER
from gateway.routing.fallbacks import Fallbacks, TryFallback
from gateway.routing.router import Query, Router
from gateway.screening.moderator import Moderator, PromptBlocked, ScreeningResult
from gateway.streaming.delivery import Delivery
from gateway.upstreams.base import Job
from gateway.upstreams.sampling import sampling_params

log = logging.getLogger("tollhouse.pipeline")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    max_body: int  # bytes
    timeout_s: float  # upper bound on a request's duration
    keep_alive_s: float = 10.0  # idle time after which a stream gets a keep-alive comment


@dataclass(slots=True)
class RequestContext:
    """The state of one request while the pipeline runs it."""

    request_id: str
    surface: Surface
    exchange: Exchange
    started: float  # monotonic
    reservation: Reservation | None = None
    meter: Meter | None = None
    fallback_from: list[str] = field(default_factory=list)  # models that failed before this one


class Pipeline:
    def __init__(
        self,
        *,
        auth: Authenticator,
        catalog: Catalog,
        admission: Admission,
        moderator: Moderator,
        router: Router,
        fallbacks: Fallbacks,
        spool: Spool,
        clock: Clock,
        limits: RequestLimits,
    ) -> None:
        self.auth = auth
        self.catalog = catalog
        self.admission = admission
        self.moderator = moderator
        self.router = router
        self.fallbacks = fallbacks
        self.spool = spool
        self.clock = clock
        self.limits = limits
        self.draining = False
        self.in_flight = 0

    async def serve(self, surface: Surface, exchange: Exchange) -> None:
        ctx = RequestContext(new_id(REQUEST), surface, exchange, self.clock.monotonic())
        token = logs.request_id.set(ctx.request_id)
        self.in_flight += 1
        metrics.in_flight.inc()
        status = 499
        try:
            status = await self._run(ctx)
        except ClientDisconnected:
            pass
        except TollhouseError as error:
            status = await self._send_error(ctx, error)
        except RecursionError:  # the body parsed, but a later step recursed too deeply
            status = await self._send_error(ctx, nested_too_deeply())
        except Exception:
            log.exception("unhandled error in the request pipeline")
            status = await self._send_error(ctx, _internal_error(ctx.request_id))
        finally:
            exchange.done()
            if ctx.meter is not None and ctx.meter.event is None:
                # Opened for a model that failed; the fallback then refused the request.
                ctx.meter.close_soon(Ending(0, 0, "refused", status, prompt_done=False), None)
            self.in_flight -= 1
            metrics.in_flight.dec()
            logs.request_id.reset(token)
            _request_counter(surface.route, status).inc()
            _duration_histogram(surface.route).observe(self.clock.monotonic() - ctx.started)

    async def _run(self, ctx: RequestContext) -> int:
        if self.draining:
            raise Unavailable("This gateway is shutting down.", code="draining", retry_after_s=1.0)
        surface, exchange = ctx.surface, ctx.exchange
        principal = await self.auth.principal(exchange, surface.route)
        options = read_options(exchange, self.limits.timeout_s)
        raw = await exchange.body(self.limits.max_body)
        request = surface.parse(raw)
        target = self.catalog.resolve(principal, request.model)
        prompt = await _prepare_prompt(request, target, principal)
        fallback_targets = self.fallbacks.after(principal, target)
        screened: ScreeningResult | None = None
        while True:
            admission_request = _admission_request(
                ctx, principal, target, prompt, prompt.request, options
            )
            ctx.reservation = await self.admission.reserve(admission_request)
            usage = SettledUsage(0, 0, 0, served=False)
            try:
                if screened is None:
                    screened = await self.moderator.screen(
                        ctx.request_id, principal, prompt.request
                    )
                    if screened.request is not prompt.request:
                        prompt = await _prepare_prompt(screened.request, target, principal)
                usage, status = await self._deliver(
                    ctx, principal, target, prompt, options, screened, final=not fallback_targets
                )
                return status
            except PromptBlocked as refused:
                usage = await self._record_blocked(
                    ctx, principal, target, prompt, options, refused.paid_by
                )
                raise
            except TryFallback as failure:
                ctx.fallback_from.append(target.model.name)
                target = fallback_targets.pop(0)
                log.warning("falling back to %s: %s", target.model.name, failure.error.message)
                metrics.fallbacks.labels(ctx.fallback_from[-1], target.model.name).inc()
            finally:
                await ctx.reservation.settle(usage)
            assert screened is not None
            prompt = await _prepare_prompt(screened.request, target, principal)

    async def _deliver(
        self,
        ctx: RequestContext,
        principal: Principal,
        target: Target,
        prompt: Prompt,
        options: RequestOptions,
        screened: ScreeningResult,
        *,
        final: bool,
    ) -> tuple[SettledUsage, int]:
        """The usage to settle and the HTTP status. Raises FallThrough when no replica answered,
        unless this is the `final` model of the fallback chain."""
        request = prompt.request
        query = Query(target, prompt.first_ids, principal.tenant_id, request, prompt.max_tokens)
        route = self.router.route(query)
        replica = route.next()
        if replica is None and (not final or not route.is_starting()):
            if not final:
                raise TryFallback(route.refusal())
            raise route.refusal()
        engine_id = replica.name if replica is not None else ""
        meter = self._meter(ctx, principal, target, prompt, request, options, engine_id, screened)
        delivery = self._delivery(ctx, principal, request, target, prompt, meter, screened)
        again, ctx.meter = ctx.meter is not None, meter
        await meter.open(again=again)
        return await delivery.run(
            route, _engine_job(ctx, principal, request, target, prompt, options), final=final
        )

    async def _record_blocked(
        self,
        ctx: RequestContext,
        principal: Principal,
        target: Target,
        prompt: Prompt,
        options: RequestOptions,
        paid_by: str,
    ) -> SettledUsage:
        """Record the blocked prompt as a usage event, whether the tenant or the operator pays."""
        screened = ScreeningResult(prompt.request, "block")
        meter = self._meter(ctx, principal, target, prompt, prompt.request, options, "", screened)
        event = await meter.close(blocked_ending(paid_by), None)
        return SettledUsage(event.input_tokens, 0, 0, 0, event.status, served=bool(event.quantity))

    def _meter(
        self,
        ctx: RequestContext,
        principal: Principal,
        target: Target,
        prompt: Prompt,
        request: InferenceRequest,
        options: RequestOptions,
        engine_id: str,
        screened: ScreeningResult,
    ) -> Meter:
        assert ctx.reservation is not None
        adapter = target.adapter
        opened = OpenedRequest(
            request_id=ctx.request_id,
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            kind=UsageKind.GENERATION if request.inputs is None else UsageKind.EMBEDDING,
            route=ctx.surface.route,
            model=target.model.name,
            adapter=adapter.name if adapter else None,
            adapter_digest=adapter.digest if adapter else None,
            price_version=ctx.reservation.price_version,
            opened_at=self.clock.now(),
            prompt_tokens=len(prompt.ids),
            engine_id=engine_id,
            end_user=request.end_user,
            client_request_id=options.client_request_id,
            batch_job=ctx.exchange.batch_job,
            prompts=max(1, len(prompt.parts)),
        )
        meter = Meter(self.spool, self.clock, opened, self.router.acknowledge_soon)
        meter.streamed = request.stream
        meter.moderation = screened.action
        meter.prompt_order = prompt.order
        meter.truncated = prompt.request.dropped
        meter.fallback_from = tuple(ctx.fallback_from)
        return meter

    def _delivery(
        self,
        ctx: RequestContext,
        principal: Principal,
        request: InferenceRequest,
        target: Target,
        prompt: Prompt,
        meter: Meter,
        screened: ScreeningResult,
    ) -> Delivery:
        assert ctx.reservation is not None
        now = self.clock.now()
        info = ResponseInfo(
            ctx.request_id,
            int(now.timestamp()),
            target.public_name,
            target.model.codec,
            len(prompt.ids),
        )
        extra = limit_headers(ctx.surface.style, ctx.reservation.limits(), principal.plan, now)
        extra = [*extra, *(screened.headers or []), *prompt.header_list()]
        if ctx.fallback_from:
            chain = " -> ".join([*ctx.fallback_from, target.model.name])
            extra.append((FALLBACK_HEADER.encode(), chain.encode("ascii", "replace")))
        return Delivery(
            ctx.surface,
            ctx.exchange,
            request,
            info,
            guards=lambda: self.moderator.guard(ctx.request_id, principal, request.choices),
            meter=meter,
            reservation=ctx.reservation,
            headers=lambda: response_headers(ctx.request_id, self._elapsed_ms(ctx), extra),
            keep_alive_s=self.limits.keep_alive_s,
        )

    async def _send_error(self, ctx: RequestContext, error: TollhouseError) -> int:
        if ctx.exchange.started or ctx.exchange.disconnected:
            return 499
        metrics.rejections.labels(error.code).inc()
        state = ctx.reservation.limits() if ctx.reservation else _limit_state(error)
        extra = error_headers(error)
        extra += limit_headers(ctx.surface.style, state, None, self.clock.now())
        headers = response_headers(ctx.request_id, self._elapsed_ms(ctx), extra)
        body = orjson.dumps(ctx.surface.error(error, ctx.request_id))
        try:
            await ctx.exchange.answer(int(error.status), headers, body)
        except ClientDisconnected:
            return 499
        return int(error.status)

    def _elapsed_ms(self, ctx: RequestContext) -> int:
        return round((self.clock.monotonic() - ctx.started) * 1000)


async def _prepare_prompt(
    request: InferenceRequest, target: Target, principal: Principal
) -> Prompt:
    check_sampling_parameters(request, target.model)
    if request.engine_parameters:
        check_capabilities(request, target.model)
    return await prepare(request, target.model.codec, target.model.context_length, principal)


def _admission_request(
    ctx: RequestContext,
    principal: Principal,
    target: Target,
    prompt: Prompt,
    request: InferenceRequest,
    options: RequestOptions,
) -> AdmissionRequest:
    return AdmissionRequest(
        request_id=ctx.request_id,
        principal=principal,
        target=target,
        route=ctx.surface.route,
        prompt_tokens=len(prompt.ids),
        max_tokens=prompt.max_tokens,
        choices=request.choices,
        timeout_s=options.timeout_s,
    )


def _engine_job(
    ctx: RequestContext,
    principal: Principal,
    request: InferenceRequest,
    target: Target,
    prompt: Prompt,
    options: RequestOptions,
) -> Job:
    adapter = target.adapter
    engine_request = GenerateRequest(
        request_id=ctx.request_id,
        namespace=principal.tenant_id,
        prompt=prompt.ids,
        sampling=sampling_params(request, prompt.max_tokens, target.model.defaults),
        adapter=adapter.digest if adapter else None,
        weight=float(principal.plan.weight),
        priority=principal.plan.priority,
        deadline_s=options.timeout_s,
    )
    if not prompt.parts:
        return Job(engine_request, request)
    names = engine_request_ids(ctx.request_id, len(prompt.parts))
    parts = [
        Job(replace(engine_request, request_id=name, prompt=part.ids), part.request)
        for name, part in zip(names, prompt.parts, strict=True)
    ]
    return Job(engine_request, request, tuple(parts))


@cache
def _request_counter(route: str, status: int) -> Counter:
    return metrics.requests.labels(route, str(status))


@cache
def _duration_histogram(route: str) -> Histogram:
    return metrics.request_seconds.labels(route)


def _limit_state(error: TollhouseError) -> LimitState:
    return LimitState(error.buckets if isinstance(error, OverLimit | OutOfMoney) else ())


def _internal_error(request_id: str) -> TollhouseError:
    return TollhouseError(
        "The gateway failed to process this request.",
        next_step=f"Report request id {request_id} to the operator.",
    )
