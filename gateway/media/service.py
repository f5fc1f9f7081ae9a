"""Serves audio and image requests: admission, moderation, an upstream, its answer, and the usage event.

Seconds and characters are what goes in: they are billed once the upstream has answered, or sent the
first audio. Images are what comes out: they are billed when they are delivered, else waived. Of an
answer that the upstream cuts, nothing is billed but what was delivered of images.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import orjson

from core.clock import Clock
from core.errors import NotFound, TollhouseError, Unavailable
from core.events import OpenedRequest, UsageKind
from core.tenants.keys import Principal
from engine.protocol import Receipt
from gateway.admission.request import AdmissionRequest
from gateway.admission.reservation import Reservation
from gateway.catalog.catalog import Target
from gateway.http.exchange import ClientDisconnected, Exchange, Headers
from gateway.http.headers import (
    RequestOptions,
    limit_headers,
    read_options,
    response_headers,
)
from gateway.inference.openai_errors import error_object
from gateway.media.endpoints import Endpoint
from gateway.media.request import MediaRequest
from gateway.media.usage import MediaUsage
from gateway.metering.meter import Ending, Meter, blocked_ending
from gateway.pipeline import Pipeline
from gateway.prompts.prompt import Prompt
from gateway.routing.router import Query, Route
from gateway.screening.moderator import PromptBlocked
from gateway.streaming.deadlines import deadline_exceeded
from gateway.upstreams.base import engine_unavailable
from gateway.upstreams.openai import OpenAIEngine
from gateway.upstreams.upstream_errors import error_of_status

log = logging.getLogger("tollhouse.media")
_STREAMED = ("audio/", "text/event-stream", "application/octet-stream")
_EVENTS = "text/event-stream"
_LARGEST_ANSWER = 256 << 20  # bytes of an answer that is not streamed
_ERROR_BYTES = 65_536
_PIECE = 65_536
_PLAIN_TYPE = re.compile(r"[a-z]+/[a-z0-9.+-]+(; ?charset=[a-z0-9-]+)?")


@dataclass
class _Call:
    """One request and what has become of it."""

    request_id: str
    principal: Principal
    request: MediaRequest
    target: Target
    options: RequestOptions
    started: float
    prompt: Prompt = field(init=False)
    reservation: Reservation | None = None
    meter: Meter | None = None
    moderation: Headers = field(default_factory=list)
    usage: MediaUsage = field(init=False)
    answered: bool = False  # the upstream's whole answer, or its first audio, has come
    delivered: bool = False


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

    async def serve(
        self, exchange: Exchange, principal: Principal, request_id: str, request: MediaRequest
    ) -> int:
        """Serve it to the end; returns the status. Raises ClientDisconnected, or an error before the
        answer has begun."""
        if self.pipeline.draining:
            raise Unavailable("This gateway is shutting down.", code="draining", retry_after_s=1.0)
        target = self.pipeline.catalog.resolve(principal, request.model)
        self.check(request.endpoint, target)
        limits = self.pipeline.limits
        options = read_options(exchange, limits.timeout_s, self.pipeline.operator_token)
        call = _Call(request_id, principal, request, target, options, self.clock.monotonic())
        call.prompt = Prompt(request.as_prompt(), [], 1)
        call.reservation = await self.pipeline.admission.reserve(_admission(call, exchange))
        try:
            return await self._reserved(exchange, call)
        finally:
            await call.reservation.settle(call.meter.event if call.meter is not None else None)

    async def _reserved(self, exchange: Exchange, call: _Call) -> int:
        moderator, services = self.pipeline.moderator, self.pipeline.metering
        try:
            screened = await moderator.screen(call.request_id, call.principal, call.prompt.request)
        except PromptBlocked as refusal:
            call.meter = Meter(services, self._opened(call, ""))
            await call.meter.close(blocked_ending(refusal.paid_by), None)
            raise
        call.moderation = screened.headers or []
        call.request = call.request.with_texts(
            tuple(str(text) for text in screened.request.prompts)
        )
        call.usage = MediaUsage(call.request)
        route = self.pipeline.router.route(
            Query(call.target, call.prompt, call.principal.tenant_id)
        )
        replica = route.next()
        if replica is None:
            raise route.refusal()
        call.meter = Meter(services, self._opened(call, replica.name))
        call.meter.moderation = screened.action
        call.meter.streamed = call.request.stream
        await call.meter.write_opened()
        assert call.reservation is not None
        call.reservation.keep()
        work = asyncio.ensure_future(self._within_deadline(exchange, call, route))

        def _stop() -> None:
            work.cancel()

        exchange.on_disconnect(_stop)
        try:
            return await work
        except asyncio.CancelledError:
            work.cancel()
            call.meter.close_soon(*self._ending(call, 499, "disconnect"))
            if exchange.disconnected:
                raise ClientDisconnected from None
            raise
        except ClientDisconnected:
            call.meter.close_soon(*self._ending(call, 499, "disconnect"))
            raise
        except TollhouseError as error:
            await call.meter.close(*self._ending(call, int(error.status), "error"))
            raise
        except BaseException:
            call.meter.close_soon(*self._ending(call, 500, "error"))
            raise

    async def _within_deadline(self, exchange: Exchange, call: _Call, route: Route) -> int:
        try:
            async with asyncio.timeout(call.options.timeout_s):
                return await self._routed(exchange, call, route)
        except TimeoutError:
            raise deadline_exceeded() from None

    async def _routed(self, exchange: Exchange, call: _Call, route: Route) -> int:
        """Try replicas until one answers, or until an answer has begun."""
        assert call.meter is not None
        replica = route.replica
        while replica is not None:
            assert isinstance(replica.client, OpenAIEngine)  # no other declares endpoints
            call.meter.routed = route.why()
            route.sent()
            try:
                status = await self._forward(exchange, call, replica.client)
            except TollhouseError as error:
                if exchange.started or not route.failed(error):
                    raise
                replica = route.next()
                if replica is None:
                    raise
                await call.meter.rerouted(replica.name)
                continue
            except BaseException:
                route.left(None)
                raise
            route.answered()
            route.left(None)
            return status
        raise route.refusal()

    async def _forward(self, exchange: Exchange, call: _Call, engine: OpenAIEngine) -> int:
        body, content_type = call.request.body(engine.upstream_model)
        path = call.request.endpoint.route
        try:
            async with engine.forward(path, body, content_type) as answer:
                if answer.status >= 300:
                    text = await answer.content.read(_ERROR_BYTES)
                    raise error_of_status(
                        engine.engine_id, call.request_id, answer.status, text, _wait(answer)
                    )
                kind = answer.headers.get("content-type", "").lower()
                if kind.startswith(_STREAMED):
                    return await self._relay(exchange, call, answer, kind)
                whole = await _read_whole(answer, engine.engine_id)
        except (aiohttp.ClientError, OSError) as error:
            raise engine_unavailable(engine.engine_id, str(error) or type(error).__name__) from None
        await asyncio.to_thread(call.usage.answer, whole)
        call.answered = True
        await self._start(exchange, call, kind, len(whole))
        await exchange.write(whole, more=False)
        call.delivered = True
        await self._close(call, 200, "stop")
        return 200

    async def _relay(
        self, exchange: Exchange, call: _Call, answer: aiohttp.ClientResponse, kind: str
    ) -> int:
        """Pass on an answer as it comes. A cut ends the connection, or a stream of events with an
        error event."""
        is_events = kind.startswith(_EVENTS)
        pieces = answer.content.iter_any()
        first = await anext(pieces, b"")
        if not first:
            raise engine_unavailable("upstream", "its answer is empty")
        await self._start(exchange, call, kind, None)
        assert call.meter is not None
        call.meter.first_token()
        try:
            async for piece in _after(first, pieces):
                await exchange.write(piece)
                call.answered = call.delivered = True
                if is_events:
                    call.usage.feed(piece)
        except (aiohttp.ClientError, OSError) as error:
            log.warning("the answer to %s was cut: %s", call.request_id, error)
            call.answered = False
            await self._close(call, 502, "error")
            if is_events:
                broken = Unavailable(
                    "The upstream of this model cut its answer.",
                    next_step="Try again; only what was delivered is charged.",
                    code="engine_unavailable",
                )
                event = orjson.dumps(error_object(broken))
                await exchange.write(b"data: " + event + b"\n\n", more=False)
            return 502
        await self._close(call, 200, "stop")
        await exchange.write(b"", more=False)
        return 200

    async def _start(self, exchange: Exchange, call: _Call, kind: str, length: int | None) -> None:
        assert call.reservation is not None
        plain = kind if _PLAIN_TYPE.fullmatch(kind) else "application/octet-stream"
        extra = [
            *limit_headers(
                "openai", call.reservation.limits(), call.principal.plan, self.clock.now()
            ),
            *call.moderation,
            (b"content-type", plain.encode()),
        ]
        if length is not None:
            extra.append((b"content-length", str(length).encode()))
        millis = round((self.clock.monotonic() - call.started) * 1000)
        await exchange.start(200, response_headers(call.request_id, millis, extra))

    async def _close(self, call: _Call, status: int, reason: str) -> None:
        assert call.meter is not None
        await call.meter.close(*self._ending(call, status, reason))

    def _ending(self, call: _Call, status: int, reason: str) -> tuple[Ending, Receipt | None]:
        """What is billed of the call as it stands."""
        usage = call.usage
        is_image = call.request.endpoint.kind is UsageKind.IMAGE
        billed = call.delivered if is_image else call.answered
        receipt = usage.receipt(call.request_id, call.principal.tenant_id)
        if not billed and not call.answered:
            return Ending(0, 0, reason, status, prompt_done=False), None
        units = usage.units if billed else 0
        return Ending(0, 0, reason, status, prompt_done=True, units=units), receipt

    def _opened(self, call: _Call, engine_id: str) -> OpenedRequest:
        principal, reservation = call.principal, call.reservation
        assert reservation is not None
        return OpenedRequest(
            request_id=call.request_id,
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            kind=call.request.endpoint.kind,
            route=call.request.endpoint.route,
            model=call.target.model.name,
            adapter=None,
            adapter_digest=None,
            price_version=reservation.price_version,
            opened_at=self.clock.now(),
            prompt_tokens=0,
            engine_id=engine_id,
            member_id=principal.member_id,
            end_user=call.request.end_user,
            client_request_id=call.options.client_request_id,
        )


def unsupported(problem: str, next_step: str) -> NotFound:
    return NotFound(problem, next_step=next_step, code="unsupported_endpoint", param="model")


def _admission(call: _Call, exchange: Exchange) -> AdmissionRequest:
    principal = call.principal
    return AdmissionRequest(
        request_id=call.request_id,
        tenant_id=principal.tenant_id,
        project_id=principal.project_id,
        key_id=principal.key_id,
        model=call.target.model.name,
        plan=principal.plan,
        prompt_tokens=0,
        max_output_tokens=1,
        currency=principal.currency,
        deadline_s=call.options.timeout_s,
        on_disconnect=exchange.on_disconnect,
        bound=call.request.bound(),
    )


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


def _wait(answer: aiohttp.ClientResponse) -> float | None:
    value = answer.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() and len(value) < 6 else None
