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
from core.events import OpenedRequest, UsageKind, engine_names
from core.ids import REQUEST, new_id
from core.tenants.keys import Principal
from engine.protocol import GenerateRequest
from gateway.ask import Ask
from gateway.auth.authenticator import Authenticator
from gateway.catalog.abilities import refuse_beyond, refuse_lacking
from gateway.catalog.catalog import Catalog, Target
from gateway.engines.base import Job
from gateway.engines.sampling import sampling_params
from gateway.exchange import ClientGone, Exchange
from gateway.limits.admission import Admission, Booking, LimitState, Spent, Wanted
from gateway.limits.refusals import OutOfMoney, OverLimit
from gateway.metering.meter import Ending, Meter, blocked
from gateway.metering.spool import Spool
from gateway.prompts.prompt import Prompt, prepare
from gateway.request_headers import (
    Told,
    answer_headers,
    limit_headers,
    read_told,
    refusal_headers,
)
from gateway.routing.fallbacks import HEADER as FALLBACK_HEADER
from gateway.routing.fallbacks import Fallbacks, FallThrough
from gateway.routing.router import Query, Router
from gateway.safety.desk import PromptBlocked, SafetyDesk, Screened
from gateway.schemas.decoding import nested_too_deeply
from gateway.streaming.delivery import Delivery
from gateway.surface import Head, Surface

log = logging.getLogger("tollhouse.pipeline")


@dataclass(frozen=True, slots=True)
class Limits:
    max_body: int  # bytes
    timeout_s: float  # upper bound on a request's duration
    keep_alive_s: float = 10.0  # idle time after which a stream gets a keep-alive comment


@dataclass(slots=True)
class Visit:
    """The state of one request while the pipeline runs it."""

    request_id: str
    surface: Surface
    exchange: Exchange
    started: float  # monotonic
    booking: Booking | None = None
    meter: Meter | None = None
    fell_from: list[str] = field(default_factory=list)  # models that failed before this one


class Pipeline:
    def __init__(
        self,
        *,
        auth: Authenticator,
        catalog: Catalog,
        admission: Admission,
        safety: SafetyDesk,
        router: Router,
        fallbacks: Fallbacks,
        spool: Spool,
        clock: Clock,
        limits: Limits,
    ) -> None:
        self.auth = auth
        self.catalog = catalog
        self.admission = admission
        self.safety = safety
        self.router = router
        self.fallbacks = fallbacks
        self.spool = spool
        self.clock = clock
        self.limits = limits
        self.draining = False
        self.in_flight = 0

    async def serve(self, surface: Surface, exchange: Exchange) -> None:
        visit = Visit(new_id(REQUEST), surface, exchange, self.clock.monotonic())
        token = logs.request_id.set(visit.request_id)
        self.in_flight += 1
        metrics.in_flight.inc()
        status = 499
        try:
            status = await self._walk(visit)
        except ClientGone:
            pass
        except TollhouseError as error:
            status = await self._refuse(visit, error)
        except RecursionError:  # the body parsed, but a later step recursed too deeply
            status = await self._refuse(visit, nested_too_deeply())
        except Exception:
            log.exception("unhandled error in the request pipeline")
            status = await self._refuse(visit, _our_fault(visit.request_id))
        finally:
            exchange.done()
            if visit.meter is not None and visit.meter.event is None:
                # Opened for a model that failed; the fallback then refused the request.
                visit.meter.close_soon(Ending(0, 0, "refused", status, prompt_done=False), None)
            self.in_flight -= 1
            metrics.in_flight.dec()
            logs.request_id.reset(token)
            _answered(surface.route, status).inc()
            _seconds(surface.route).observe(self.clock.monotonic() - visit.started)

    async def _walk(self, visit: Visit) -> int:
        if self.draining:
            raise Unavailable("This gateway is shutting down.", code="draining", retry_after_s=1.0)
        surface, exchange = visit.surface, visit.exchange
        principal = await self.auth.principal(exchange, surface.route)
        told = read_told(exchange, self.limits.timeout_s)
        raw = await exchange.body(self.limits.max_body)
        ask = surface.parse(raw)
        target = self.catalog.resolve(principal, ask.model)
        prompt = await _prepared(ask, target, principal)
        later = self.fallbacks.after(principal, target)
        screened: Screened | None = None
        while True:
            wanted = _wanted(visit, principal, target, prompt, prompt.ask, told)
            visit.booking = await self.admission.book(wanted)
            spent = Spent(0, 0, 0, served=False)
            try:
                if screened is None:
                    screened = await self.safety.screen(visit.request_id, principal, prompt.ask)
                    if screened.ask is not prompt.ask:
                        prompt = await _prepared(screened.ask, target, principal)
                spent, status = await self._deliver(
                    visit, principal, target, prompt, told, screened, final=not later
                )
                return status
            except PromptBlocked as refused:
                spent = await self._blocked(visit, principal, target, prompt, told, refused.paid_by)
                raise
            except FallThrough as fell:
                visit.fell_from.append(target.model.name)
                target = later.pop(0)
                log.warning("falling back to %s: %s", target.model.name, fell.error.message)
                metrics.fallbacks.labels(visit.fell_from[-1], target.model.name).inc()
            finally:
                await visit.booking.settle(spent)
            assert screened is not None
            prompt = await _prepared(screened.ask, target, principal)

    async def _deliver(
        self,
        visit: Visit,
        principal: Principal,
        target: Target,
        prompt: Prompt,
        told: Told,
        screened: Screened,
        *,
        final: bool,
    ) -> tuple[Spent, int]:
        """The usage to settle and the HTTP status. Raises FallThrough when no replica answered,
        unless this is the `final` model of the fallback chain."""
        ask = prompt.ask
        query = Query(target, prompt.lead, principal.tenant_id, ask, prompt.max_tokens)
        route = self.router.route(query)
        place = route.next()
        if place is None and (not final or not route.coming()):
            if not final:
                raise FallThrough(route.refusal())
            raise route.refusal()
        engine_id = place.name if place is not None else ""
        meter = self._meter(visit, principal, target, prompt, ask, told, engine_id, screened)
        delivery = self._delivery(visit, principal, ask, target, prompt, meter, screened)
        again, visit.meter = visit.meter is not None, meter
        await meter.open(again=again)
        return await delivery.run(
            route, _job(visit, principal, ask, target, prompt, told), final=final
        )

    async def _blocked(
        self,
        visit: Visit,
        principal: Principal,
        target: Target,
        prompt: Prompt,
        told: Told,
        paid_by: str,
    ) -> Spent:
        """Record the blocked prompt as a usage event, whether the tenant or the operator pays."""
        screened = Screened(prompt.ask, "block")
        meter = self._meter(visit, principal, target, prompt, prompt.ask, told, "", screened)
        event = await meter.close(blocked(paid_by), None)
        return Spent(event.input_tokens, 0, 0, 0, event.status, served=bool(event.quantity))

    def _meter(
        self,
        visit: Visit,
        principal: Principal,
        target: Target,
        prompt: Prompt,
        ask: Ask,
        told: Told,
        engine_id: str,
        screened: Screened,
    ) -> Meter:
        assert visit.booking is not None
        adapter = target.adapter
        opened = OpenedRequest(
            request_id=visit.request_id,
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            kind=UsageKind.GENERATION if ask.inputs is None else UsageKind.EMBEDDING,
            route=visit.surface.route,
            model=target.model.name,
            adapter=adapter.name if adapter else None,
            adapter_digest=adapter.digest if adapter else None,
            price_version=visit.booking.price_version,
            opened_at=self.clock.now(),
            prompt_tokens=len(prompt.ids),
            engine_id=engine_id,
            end_user=ask.end_user,
            client_request_id=told.client_request_id,
            batch_job=visit.exchange.batch_job,
            prompts=max(1, len(prompt.parts)),
        )
        meter = Meter(self.spool, self.clock, opened, self.router.acknowledge_soon)
        meter.streamed = ask.stream
        meter.moderation = screened.action
        meter.prompt_order = prompt.order
        meter.truncated = prompt.ask.dropped
        meter.fell_from = tuple(visit.fell_from)
        return meter

    def _delivery(
        self,
        visit: Visit,
        principal: Principal,
        ask: Ask,
        target: Target,
        prompt: Prompt,
        meter: Meter,
        screened: Screened,
    ) -> Delivery:
        assert visit.booking is not None
        now = self.clock.now()
        head = Head(
            visit.request_id,
            int(now.timestamp()),
            target.public_name,
            target.model.codec,
            len(prompt.ids),
        )
        extra = limit_headers(visit.surface.style, visit.booking.limits(), principal.plan, now)
        extra = [*extra, *(screened.headers or []), *prompt.header_list()]
        if visit.fell_from:
            way = " -> ".join([*visit.fell_from, target.model.name])
            extra.append((FALLBACK_HEADER.encode(), way.encode("ascii", "replace")))
        return Delivery(
            visit.surface,
            visit.exchange,
            ask,
            head,
            guards=lambda: self.safety.guard(visit.request_id, principal, ask.choices),
            meter=meter,
            booking=visit.booking,
            headers=lambda: answer_headers(visit.request_id, self._millis(visit), extra),
            keep_alive_s=self.limits.keep_alive_s,
        )

    async def _refuse(self, visit: Visit, error: TollhouseError) -> int:
        if visit.exchange.started or visit.exchange.gone:
            return 499
        metrics.rejections.labels(error.code).inc()
        state = visit.booking.limits() if visit.booking else _state_of(error)
        extra = refusal_headers(error)
        extra += limit_headers(visit.surface.style, state, None, self.clock.now())
        headers = answer_headers(visit.request_id, self._millis(visit), extra)
        body = orjson.dumps(visit.surface.error(error, visit.request_id))
        try:
            await visit.exchange.answer(int(error.status), headers, body)
        except ClientGone:
            return 499
        return int(error.status)

    def _millis(self, visit: Visit) -> int:
        return round((self.clock.monotonic() - visit.started) * 1000)


async def _prepared(ask: Ask, target: Target, principal: Principal) -> Prompt:
    refuse_lacking(ask, target.model)
    if ask.beyond:
        refuse_beyond(ask, target.model)
    return await prepare(ask, target.model.codec, target.model.context_length, principal)


def _wanted(
    visit: Visit, principal: Principal, target: Target, prompt: Prompt, ask: Ask, told: Told
) -> Wanted:
    return Wanted(
        request_id=visit.request_id,
        principal=principal,
        target=target,
        route=visit.surface.route,
        prompt_tokens=len(prompt.ids),
        max_tokens=prompt.max_tokens,
        choices=ask.choices,
        timeout_s=told.timeout_s,
    )


def _job(
    visit: Visit,
    principal: Principal,
    ask: Ask,
    target: Target,
    prompt: Prompt,
    told: Told,
) -> Job:
    adapter = target.adapter
    request = GenerateRequest(
        request_id=visit.request_id,
        namespace=principal.tenant_id,
        prompt=prompt.ids,
        sampling=sampling_params(ask, prompt.max_tokens, target.model.defaults),
        adapter=adapter.digest if adapter else None,
        weight=float(principal.plan.weight),
        priority=principal.plan.priority,
        deadline_s=told.timeout_s,
    )
    if not prompt.parts:
        return Job(request, ask)
    names = engine_names(visit.request_id, len(prompt.parts))
    parts = [
        Job(replace(request, request_id=name, prompt=part.ids), part.ask)
        for name, part in zip(names, prompt.parts, strict=True)
    ]
    return Job(request, ask, tuple(parts))


@cache
def _answered(route: str, status: int) -> Counter:
    return metrics.requests.labels(route, str(status))


@cache
def _seconds(route: str) -> Histogram:
    return metrics.request_seconds.labels(route)


def _state_of(error: TollhouseError) -> LimitState:
    return LimitState(error.buckets if isinstance(error, OverLimit | OutOfMoney) else ())


def _our_fault(request_id: str) -> TollhouseError:
    return TollhouseError(
        "The gateway failed to process this request.",
        next_step=f"Report request id {request_id} to the operator.",
    )
