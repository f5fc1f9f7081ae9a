"""The path of an inference request, from the API key to the usage event.

auth -> request options -> prompt -> admission (limits and money) -> moderation -> routing -> engine
-> streaming, with the output guard -> metering. It serves every inference route as a `Surface`.
"""

from contextlib import nullcontext
from dataclasses import dataclass

from core import logs, metrics
from core.clock import Clock
from core.ids import REQUEST, new_id
from gateway.admission.limiter import Admission
from gateway.answers.deadlines import shutting_down
from gateway.answers.surface import Surface
from gateway.catalog.catalog import Catalog
from gateway.edge.auth.authenticator import Authenticator
from gateway.edge.decoding import parse_body
from gateway.engines.routing.fallbacks import Fallbacks, TryFallback, fall_back
from gateway.engines.routing.router import Router
from gateway.metering.meter import MeterServices, refused_ending
from gateway.prompts.prompt import Held, prepare_for
from gateway.prompts.stored_prompts import StoredPrompts
from gateway.request.exchange import ClientDisconnected, Exchange
from gateway.request.spans import NO_TRACER, Tracer
from gateway.screening.moderator import Moderator, PromptBlocked, ScreeningResult
from gateway.serving import step_values
from gateway.serving.context import RequestContext
from gateway.serving.headers import read_options, with_client_id
from gateway.serving.response_cache.cache import ResponseCache
from gateway.serving.responses import RequestLimits, Responses

_LARGE_BODY = 16_384  # bytes, from which on a prompt may take milliseconds to encode


@dataclass(kw_only=True)
class Pipeline:
    auth: Authenticator
    catalog: Catalog
    admission: Admission
    moderator: Moderator
    router: Router
    fallbacks: Fallbacks
    cache: ResponseCache
    prompts: StoredPrompts
    metering: MeterServices
    responses: Responses
    clock: Clock
    limits: RequestLimits
    operator_token: str
    tracer: Tracer = NO_TRACER
    draining: bool = False
    leaving: bool = False  # it serves on, but /readyz asks balancers to send nothing more

    async def serve(self, surface: Surface, exchange: Exchange) -> None:
        id, started = exchange.request_id or new_id(REQUEST), self.clock.monotonic()
        ctx = RequestContext(request_id=id, started=started, exchange=exchange, surface=surface)
        token = logs.request_id.set(ctx.request_id)
        metrics.in_flight.inc()
        try:
            with self.tracer.request(ctx):
                await self._serve(ctx)
        finally:
            metrics.in_flight.dec()
            logs.request_id.reset(token)

    async def _serve(self, ctx: RequestContext) -> None:
        status = 499
        try:
            status = await self._run(ctx)
        except ClientDisconnected:
            pass
        except Exception as error:
            status = await self.responses.send_error(ctx, await self.admission.refused(ctx, error))
        finally:
            ctx.exchange.done()
            if ctx.meter is not None and ctx.meter.event is None:
                # It was opened for a model that failed, and the fallback refused it.
                ctx.meter.close_soon(refused_ending(status), None)
            self.responses.count(ctx, status)

    async def _run(self, ctx: RequestContext) -> int:
        if self.draining:
            raise shutting_down()
        await self._authenticate(ctx)
        await self._read(ctx)
        await self._prepare(ctx, self.admission.request_rate.hold_for_large(ctx))
        if "store" in ctx.request.extra:
            await self.responses.completions.check_room(ctx)
        while True:
            await self._admit(ctx)
            try:
                await self._screen(ctx)
                return await self._deliver(ctx)
            except PromptBlocked as refusal:
                ctx.screening = ScreeningResult(ctx.prompt.request, "block")
                await step_values.record_blocked(ctx, self.metering, refusal.paid_by)
                raise
            except TryFallback as failure:
                fall_back(ctx, failure)
            finally:
                await ctx.settle()
            await self._prepare(ctx)

    async def _authenticate(self, ctx: RequestContext) -> None:
        with ctx.trace.span("auth"):
            ctx.principal = await self.auth.principal(ctx.exchange, ctx.surface.route)

    async def _read(self, ctx: RequestContext) -> None:
        ctx.options = read_options(ctx.exchange, self.limits.timeout_s, self.operator_token)
        body = await ctx.exchange.body(self.limits.max_body)
        ctx.large = len(body) > _LARGE_BODY
        ctx.given = ctx.request = self.limits.asked(await parse_body(ctx.surface.parse, body))
        ctx.options = with_client_id(ctx.options, ctx.request.client_request_id)
        if ctx.request.prompt is not None:
            ctx.given = ctx.request = await self.prompts.fill(ctx.principal, ctx.request)
        self.fallbacks.choose(ctx, self.catalog.resolve(ctx.principal, ctx.request.model))
        self.admission.begin_tier(ctx)
        ctx.lookup = self.cache.begin(ctx)

    async def _prepare(self, ctx: RequestContext, held: Held = nullcontext) -> None:
        ctx.prompt = await prepare_for(ctx.request, ctx.target, ctx.principal, held)

    async def _admit(self, ctx: RequestContext) -> None:
        ctx.labels = step_values.labels(ctx)
        with ctx.trace.span("admission"):
            ctx.reservation = await self.admission.reserve(step_values.admission_request(ctx))

    async def _screen(self, ctx: RequestContext) -> None:
        if ctx.screening is not None:
            return  # the prompt of a fallback is screened already
        given = ctx.prompt.request
        with ctx.trace.span("moderation"):
            ctx.screening = await self.moderator.screen(ctx.request_id, ctx.principal, given)
        ctx.request = ctx.screening.request
        if ctx.request is not given:
            await self._prepare(ctx)

    async def _deliver(self, ctx: RequestContext) -> int:
        """The HTTP status. Raises TryFallback if no replica answered and a fallback is left."""
        if ctx.lookup is not None and self.cache.find(ctx, ctx.lookup):
            return await self._deliver_cached(ctx, ctx.lookup.source)
        with ctx.trace.span("engine"):
            route, final = self.router.route(step_values.query_of(ctx)), not ctx.fallbacks
            replica = route.next()
            if replica is None and not (final and route.is_starting()):
                raise route.refusal() if final else TryFallback(route.refusal())
            engine_id = replica.name if replica is not None else ""
            meter = await step_values.open_meter(ctx, self.metering, engine_id)
            delivery = self.responses.delivery(ctx, meter, self.limits.keep_alive_s)
            return await delivery.run(route, step_values.job_of(ctx), final=final)

    async def _deliver_cached(self, ctx: RequestContext, source: str) -> int:
        """The HTTP status. The cached answer passes the output guard and the meter like a new one."""
        meter = await step_values.open_meter(ctx, self.metering, "")
        meter.routed = source
        delivery = self.responses.delivery(ctx, meter, self.limits.keep_alive_s)
        route = self.router.route(step_values.query_of(ctx))
        return await delivery.run(route, step_values.job_of(ctx))
