"""Serves audio and image requests: admission, moderation, an upstream, its answer, and the usage event.

Seconds and characters are what goes in: they are billed once the upstream has answered, or sent the
first audio. Images are what comes out: they are billed when they are delivered, else waived. Of an
answer that the upstream cuts, nothing is billed but what was delivered of images.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import orjson
from msgspec.structs import replace

from core.clock import Clock
from core.errors import NotFound, TollhouseError, Unavailable
from core.events import UsageKind
from core.tenants.keys import Principal
from gateway.answers.deadlines import deadline_exceeded, shutting_down
from gateway.catalog.catalog import Target
from gateway.edge.api_errors import error_object
from gateway.engines.openai import OpenAIEngine
from gateway.engines.routing.fallbacks import TryFallback, fall_back, fallback_headers
from gateway.engines.routing.router import RETRY_ON_FALLBACK, Route
from gateway.engines.upstream_errors import error_of_status
from gateway.metering.meter import Meter, blocked_ending
from gateway.prompts.prompt import Prompt
from gateway.request.engine import engine_unavailable
from gateway.request.exchange import ClientDisconnected
from gateway.screening.moderator import PromptBlocked
from gateway.serving.headers import limit_headers, read_options, response_headers
from gateway.serving.media import transcripts
from gateway.serving.media.context import MediaContext
from gateway.serving.media.request import Endpoint
from gateway.serving.media.transcripts import TranscriptBlocked, TranscriptEvents
from gateway.serving.media.usage import MediaUsage
from gateway.serving.pipeline import Pipeline
from gateway.serving.step_values import opened_request, query_of

log = logging.getLogger("tollhouse.media")
_STREAMED = ("audio/", "text/event-stream", "application/octet-stream")
_EVENTS = "text/event-stream"
_LARGEST_ANSWER = 256 << 20  # bytes of an answer that is not streamed
_ERROR_BYTES = 65_536
_PIECE = 65_536
_PLAIN_TYPE = re.compile(r"[a-z]+/[a-z0-9.+-]+(; ?charset=[a-z0-9-]+)?")


@dataclass(frozen=True)
class MediaService:
    pipeline: Pipeline
    clock: Clock
    max_bytes: int  # of an upload

    def check_served(self, endpoint: Endpoint, principal: Principal) -> None:
        """Raises NotFound unless a model that the key may use has the endpoint."""
        models = self.pipeline.catalog.models(principal)
        if not any(endpoint.name in model.endpoints for model in models):
            raise unsupported(
                f"{endpoint.route} is not supported by this gateway.",
                "Send these requests to a server that has it; for what is served, see /docs.",
            )

    def check(self, endpoint: Endpoint, target: Target) -> None:
        """Raises NotFound unless the model's upstreams declare the endpoint."""
        if endpoint.name in target.model.endpoints:
            return
        raise unsupported(
            f"{target.model.name} does not support {endpoint.route}.",
            f"Use a model whose upstream entry lists {endpoint.name} in endpoints.",
        )

    async def serve(self, ctx: MediaContext) -> int:
        """Serve it to the end; returns the status. Raises ClientDisconnected, or an error before the
        answer has begun."""
        if self.pipeline.draining:
            raise shutting_down()
        self._choose(ctx)
        limits = self.pipeline.limits
        ctx.options = read_options(ctx.exchange, limits.timeout_s, self.pipeline.operator_token)
        ctx.deadline = self.clock.monotonic() + ctx.options.timeout_s
        ctx.prompt = Prompt(ctx.request.as_prompt(), [], 1)
        while True:
            with ctx.trace.span("admission"):
                ctx.reservation = await self.pipeline.admission.reserve(ctx.admission())
            try:
                await self._screen(ctx)
                with ctx.trace.span("engine"):
                    return await self._deliver(ctx)
            except TryFallback as failure:
                fall_back(ctx, failure)
            finally:
                await ctx.settle()

    def _choose(self, ctx: MediaContext) -> None:
        """Set the target, and of its fallback chain the models that have the endpoint."""
        ctx.target = self.pipeline.catalog.resolve(ctx.principal, ctx.request.model)
        self.check(ctx.endpoint, ctx.target)
        chain = self.pipeline.fallbacks.after(ctx.principal, ctx.target)
        ctx.fallbacks = [each for each in chain if ctx.endpoint.name in each.model.endpoints]

    async def _screen(self, ctx: MediaContext) -> None:
        if ctx.screening is not None:
            return  # of a fallback: it is screened already
        given = ctx.prompt.request
        try:
            with ctx.trace.span("moderation"):
                ctx.screening = await self.pipeline.moderator.screen(
                    ctx.request_id, ctx.principal, given
                )
        except PromptBlocked as refusal:
            ctx.meter = self._meter(ctx, "")
            await ctx.meter.close(blocked_ending(refusal.paid_by), None)
            raise
        texts = tuple(str(text) for text in ctx.screening.request.prompts)
        ctx.request = ctx.request.with_texts(texts)
        ctx.usage = MediaUsage(ctx.request)

    async def _deliver(self, ctx: MediaContext) -> int:
        route = self.pipeline.router.route(query_of(ctx))
        replica = route.next()
        if replica is None:
            raise TryFallback(route.refusal()) if ctx.fallbacks else route.refusal()
        again = ctx.meter is not None  # opened for a model that failed
        ctx.meter = self._meter(ctx, replica.name)
        with ctx.trace.span("opened"):
            await ctx.meter.write_opened(again=again)
        assert ctx.reservation is not None
        ctx.reservation.keep()
        work = asyncio.ensure_future(self._within_deadline(ctx, route))

        def _stop() -> None:
            work.cancel()

        ctx.exchange.on_disconnect(_stop)
        try:
            return await work
        except TryFallback:
            raise
        except asyncio.CancelledError:
            work.cancel()
            ctx.meter.close_soon(*ctx.ending(499, "disconnect"))
            if ctx.exchange.disconnected:
                raise ClientDisconnected from None
            raise
        except ClientDisconnected:
            ctx.meter.close_soon(*ctx.ending(499, "disconnect"))
            raise
        except TranscriptBlocked as error:
            await ctx.meter.close(*ctx.ending(int(error.status), str(error.code)))
            raise
        except TollhouseError as error:
            await ctx.meter.close(*ctx.ending(int(error.status), "error"))
            raise
        except BaseException:
            ctx.meter.close_soon(*ctx.ending(500, "error"))
            raise

    async def _within_deadline(self, ctx: MediaContext, route: Route) -> int:
        try:
            async with asyncio.timeout(ctx.deadline - self.clock.monotonic()):
                return await self._routed(ctx, route)
        except TimeoutError:
            raise deadline_exceeded() from None

    async def _routed(self, ctx: MediaContext, route: Route) -> int:
        """Try replicas until one answers, or until an answer has begun. Raises TryFallback when none
        answered and another model may."""
        assert ctx.meter is not None
        replica = route.replica
        while replica is not None:
            assert isinstance(replica.client, OpenAIEngine)  # no other declares endpoints
            ctx.meter.routed = route.why()
            route.sent()
            try:
                status = await self._forward(ctx, replica.client)
            except TranscriptBlocked:  # it has answered
                route.answered()
                route.left(None)
                raise
            except TollhouseError as error:
                may_retry = route.failed(error)
                if ctx.exchange.started:
                    raise
                replica = route.next() if may_retry else None
                if replica is not None:
                    await ctx.meter.rerouted(replica.name)
                    continue
                if ctx.fallbacks and error.code in RETRY_ON_FALLBACK:
                    raise TryFallback(error) from None
                raise
            except BaseException:
                route.left(None)
                raise
            route.answered()
            route.left(None)
            return status
        raise route.refusal()

    async def _forward(self, ctx: MediaContext, engine: OpenAIEngine) -> int:
        body, content_type = ctx.request.body(engine.upstream_model)
        if ctx.endpoint.kind is UsageKind.AUDIO:
            moderator = self.pipeline.moderator
            ctx.guards = moderator.guard(ctx.request_id, ctx.principal, transcripts.GUARDS)
        path = ctx.request.endpoint.route
        try:
            async with engine.forward(path, body, content_type) as answer:
                if answer.status >= 300:
                    text = await answer.content.read(_ERROR_BYTES)
                    wait = answer.headers.get("retry-after", "")
                    raise error_of_status(
                        engine.engine_id, ctx.request_id, answer.status, text, wait
                    )
                kind = answer.headers.get("content-type", "").lower()
                if kind.startswith(_EVENTS if ctx.guards else _STREAMED):
                    return await self._relay(ctx, answer, kind)
                whole = await _read_whole(answer, engine.engine_id)
        except (aiohttp.ClientError, OSError) as error:
            raise engine_unavailable(engine.engine_id, str(error) or type(error).__name__) from None
        assert ctx.meter is not None
        await asyncio.to_thread(ctx.usage.answer, whole)
        ctx.answered = True
        whole = await transcripts.screened(whole, ctx.guards)
        await self._start(ctx, kind, len(whole))
        await ctx.exchange.write(whole, more=False)
        ctx.delivered = True
        await ctx.meter.close(*ctx.ending(200, "stop"))
        return 200

    async def _relay(self, ctx: MediaContext, answer: aiohttp.ClientResponse, kind: str) -> int:
        """Pass on an answer as it comes. A cut ends the connection, or a stream of events with an
        error event."""
        is_events = kind.startswith(_EVENTS)
        pieces = answer.content.iter_any()
        first = await anext(pieces, b"")
        if not first:
            raise engine_unavailable("upstream", "its answer is empty")
        await self._start(ctx, kind, None)
        assert ctx.meter is not None
        ctx.meter.first_token()
        events = TranscriptEvents(ctx.guards) if ctx.guards else None
        try:
            async for piece in _after(first, pieces):
                ctx.answered = True
                if is_events:
                    ctx.usage.feed(piece)
                await ctx.exchange.write(await events.feed(piece) if events else piece)
                ctx.delivered = True
            if events:
                await ctx.exchange.write(await events.end())
        except TranscriptBlocked as blocked:
            await ctx.meter.close(*ctx.ending(200, str(blocked.code)))
            await ctx.exchange.write(_error_event(blocked), more=False)
            return 200
        except (aiohttp.ClientError, OSError) as error:
            log.warning("the answer to %s was cut: %s", ctx.request_id, error)
            ctx.answered = False
            await ctx.meter.close(*ctx.ending(502, "error"))
            ctx.exchange.broken = True  # a retry with the same Idempotency-Key runs again
            if is_events:
                broken = Unavailable(
                    "The upstream of this model cut its answer.",
                    next_step="Try again; only what was delivered is charged.",
                    code="engine_unavailable",
                )
                await ctx.exchange.write(_error_event(broken), more=False)
            return 502
        await ctx.meter.close(*ctx.ending(200, "stop"))
        await ctx.exchange.write(b"", more=False)
        return 200

    async def _start(self, ctx: MediaContext, kind: str, length: int | None) -> None:
        assert ctx.reservation is not None and ctx.screening is not None
        plain = kind if _PLAIN_TYPE.fullmatch(kind) else "application/octet-stream"
        extra = [
            *limit_headers(
                "openai", ctx.reservation.limits(), ctx.principal.plan, self.clock.now()
            ),
            *(ctx.screening.headers or []),
            *fallback_headers(ctx),
            (b"content-type", plain.encode()),
        ]
        if length is not None:
            extra.append((b"content-length", str(length).encode()))
        millis = round((self.clock.monotonic() - ctx.started) * 1000)
        await ctx.exchange.start(200, response_headers(ctx.request_id, millis, extra))

    def _meter(self, ctx: MediaContext, engine_id: str) -> Meter:
        services = self.pipeline.metering
        opened = opened_request(ctx, services.clock.now(), engine_id)
        # The upstream is asked for its own model, whatever adapter the name has.
        opened = replace(opened, adapter=None, adapter_digest=None)
        meter = Meter(services, opened, ctx.trace)
        meter.moderation = ctx.screening.action if ctx.screening is not None else None
        meter.streamed = ctx.request.stream
        meter.fallback_from = tuple(ctx.fallback_from)
        return meter


def _error_event(error: TollhouseError) -> bytes:
    return b"data: " + orjson.dumps(error_object(error)) + b"\n\n"


def unsupported(problem: str, next_step: str) -> NotFound:
    return NotFound(problem, next_step=next_step, code="unsupported_endpoint", param="model")


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


async def _read_whole(answer: aiohttp.ClientResponse, engine_id: str) -> bytes:
    parts, size = [], 0
    async for piece in answer.content.iter_chunked(_PIECE):
        size += len(piece)
        if size > _LARGEST_ANSWER:
            raise engine_unavailable(
                engine_id, f"its answer is larger than {_LARGEST_ANSWER} bytes"
            )
        parts.append(piece)
    return b"".join(parts)
