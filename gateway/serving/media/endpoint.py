"""One route of audio or images, as an ASGI callable."""

import asyncio
import logging
from typing import Any

import orjson
from starlette.requests import Request

from core import metrics
from core.errors import TollhouseError
from core.idempotency import StoredResponse
from core.ids import REQUEST, new_id
from gateway.edge.api_errors import error_object
from gateway.metering.meter import refused_ending
from gateway.request.exchange import ClientDisconnected, Exchange, Scope
from gateway.serving.headers import error_headers, response_headers
from gateway.serving.idempotency import HEADER as IDEMPOTENCY_KEY
from gateway.serving.idempotency import IdempotencyKeys, Recorder, replay
from gateway.serving.media.context import MediaContext
from gateway.serving.media.request import Endpoint, read_form, read_json
from gateway.serving.media.service import MediaService
from gateway.serving.request_labels import labels_of

log = logging.getLogger("tollhouse.media")


class MediaEndpoint:
    def __init__(self, endpoint: Endpoint, service: MediaService, keys: IdempotencyKeys) -> None:
        self._endpoint = endpoint
        self._service = service
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        clock, exchange = self._service.clock, Exchange(scope, receive, send)
        ctx = MediaContext(
            request_id=new_id(REQUEST),
            endpoint=self._endpoint,
            exchange=exchange,
            started=clock.monotonic(),
        )
        status = 499
        metrics.in_flight.inc()
        try:
            with self._service.pipeline.tracer.request(ctx):
                status = await self._traced(ctx, Request(scope, receive))
        finally:
            exchange.done()
            metrics.in_flight.dec()
            metrics.requests.labels(ctx.route, str(status)).inc()
            metrics.request_seconds.labels(ctx.route).observe(clock.monotonic() - ctx.started)

    async def _traced(self, ctx: MediaContext, request: Request) -> int:
        status = 499
        try:
            status = await self._serve(ctx, request)
        except ClientDisconnected:
            pass
        except Exception as error:
            status = await self._send_error(ctx, error)
        finally:
            if ctx.meter is not None and ctx.meter.event is None:
                # It was opened for a model that failed, and the fallback refused it.
                ctx.meter.close_soon(refused_ending(status), None)
            if ctx.claim is not None:
                await ctx.claim.settle(None)
        return status

    async def _serve(self, ctx: MediaContext, request: Request) -> int:
        service, endpoint = self._service, self._endpoint
        with ctx.trace.span("auth"):
            ctx.principal = await service.pipeline.auth.principal(ctx.exchange, endpoint.route)
        service.check_served(endpoint, ctx.principal)
        ctx.labels = labels_of(ctx.principal, ctx.exchange)
        if endpoint.form:
            ctx.request = await read_form(endpoint, request, service.max_bytes)
        else:
            raw = await ctx.exchange.body(service.pipeline.limits.max_body)
            ctx.request = await read_json(endpoint, raw)
        if IDEMPOTENCY_KEY in ctx.exchange.headers:
            # The boundaries of a form differ from one attempt to the next; its fields do not.
            same = await asyncio.to_thread(ctx.request.fingerprint)
            named = (ctx.request.end_user,) if ctx.request.end_user else ()
            claim = await self._keys.claim(
                ctx.exchange, ctx.principal, ctx.route, same, lambda: named
            )
            if isinstance(claim, StoredResponse):
                service.pipeline.catalog.resolve(ctx.principal, ctx.request.model)
                await replay(ctx.exchange, claim)
                return claim.status
            ctx.claim = claim
            ctx.exchange = Recorder(ctx.exchange, ctx.principal, b"", claim)
        try:
            return await service.serve(ctx)
        except TollhouseError as error:
            service.pipeline.responses.rejections.count(error, ctx.principal.tenant_id)
            raise

    async def _send_error(self, ctx: MediaContext, failure: Exception) -> int:
        if isinstance(failure, TollhouseError):
            error = failure
        else:
            log.error("unhandled error in %s", ctx.route, exc_info=failure)
            error = TollhouseError(
                "The gateway failed to process this request.",
                next_step=f"Report request id {ctx.request_id} to the operator.",
            )
        if ctx.exchange.started or ctx.exchange.disconnected:
            return 499  # the connection ends without the end of the answer
        ctx.trace.set_error(error)
        headers = response_headers(ctx.request_id, 0, error_headers(error))
        try:
            body = orjson.dumps(error_object(error))
            await ctx.exchange.answer(int(error.status), headers, body)
        except ClientDisconnected:
            return 499
        return int(error.status)
