"""One route of audio or images, as an ASGI callable."""

import logging
from typing import Any

import orjson
from starlette.requests import Request

from core import metrics
from core.errors import BadRequest, TollhouseError
from core.ids import REQUEST, new_id
from gateway.http.exchange import ClientDisconnected, Exchange, Scope
from gateway.http.headers import error_headers, response_headers
from gateway.http.idempotency import HEADER as IDEMPOTENCY_KEY
from gateway.inference.openai_errors import error_object
from gateway.media.endpoints import Endpoint
from gateway.media.request import read_form, read_json
from gateway.media.service import MediaService

log = logging.getLogger("tollhouse.media")


class MediaEndpoint:
    def __init__(self, endpoint: Endpoint, service: MediaService) -> None:
        self._endpoint = endpoint
        self._service = service

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        request_id, status = new_id(REQUEST), 499
        began = self._service.clock.monotonic()
        metrics.in_flight.inc()
        try:
            status = await self._serve(exchange, Request(scope, receive), request_id)
        except ClientDisconnected:
            pass
        except Exception as error:
            status = await self._send_error(exchange, request_id, error)
        finally:
            exchange.done()
            metrics.in_flight.dec()
            metrics.requests.labels(self._endpoint.route, str(status)).inc()
            seconds = self._service.clock.monotonic() - began
            metrics.request_seconds.labels(self._endpoint.route).observe(seconds)

    async def _serve(self, exchange: Exchange, request: Request, request_id: str) -> int:
        service, endpoint = self._service, self._endpoint
        principal = await service.pipeline.auth.principal(exchange, endpoint.route)
        service.check_served(endpoint, principal)
        if IDEMPOTENCY_KEY in exchange.headers:
            raise BadRequest(
                f"{endpoint.route} does not take an Idempotency-Key.",
                next_step="Send the request without it.",
                param="Idempotency-Key",
                code="unsupported_parameter",
            )
        if endpoint.form:
            asked = await read_form(endpoint, request, service.max_bytes)
        else:
            raw = await exchange.body(service.pipeline.limits.max_body)
            asked = await read_json(endpoint, raw)
        try:
            return await service.serve(exchange, principal, request_id, asked)
        except TollhouseError as error:
            service.pipeline.responses.rejections.count(error, principal.tenant_id)
            raise

    async def _send_error(self, exchange: Exchange, request_id: str, failure: Exception) -> int:
        if isinstance(failure, TollhouseError):
            error = failure
        else:
            log.error("unhandled error in %s", self._endpoint.route, exc_info=failure)
            error = TollhouseError(
                "The gateway failed to process this request.",
                next_step=f"Report request id {request_id} to the operator.",
            )
        if exchange.started or exchange.disconnected:
            return 499  # the connection ends without the end of the answer
        headers = response_headers(request_id, 0, error_headers(error))
        try:
            await exchange.answer(int(error.status), headers, orjson.dumps(error_object(error)))
        except ClientDisconnected:
            return 499
        return int(error.status)
