"""Idempotency-Key: a repeated request gets the stored response and is not billed again.

Successful responses and client errors are stored for a day. Server errors, rate limits and
disconnects are not: the next attempt runs as new. The claim is settled before the last byte is sent,
so that an immediate retry sees the result.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta

import orjson
from sqlalchemy.exc import SQLAlchemyError

from core import idempotency, metrics
from core.clock import Clock
from core.database import Database
from core.errors import BadRequest, DependencyDown, TollhouseError
from core.idempotency import MOST_BYTES, Kept
from core.ids import REQUEST, new_id
from core.tenants.keys import Principal
from gateway.exchange import ClientGone, Exchange, Headers
from gateway.pipeline import Pipeline
from gateway.request_headers import answer_headers, refusal_headers
from gateway.surface import Surface

log = logging.getLogger(__name__)
HEADER = b"idempotency-key"
_LONGEST_KEY = 255
_NOT_KEPT = (401, 403, 408, 409, 429)
_SPARE_S = 60.0  # beyond the request timeout, before a claim is considered abandoned


class Once:
    def __init__(self, pipeline: Pipeline, database: Database, clock: Clock) -> None:
        self._pipeline = pipeline
        self._database = database
        self._clock = clock

    async def serve(self, surface: Surface, exchange: Exchange) -> None:
        try:
            try:
                principal = await self._pipeline.auth.principal(exchange, surface.route)
                key = _key_of(exchange)
                body = await exchange.body(self._pipeline.limits.max_body)
                claim_id, kept = await self._asked(principal, key, surface.route, body)
            except TollhouseError as error:
                await _refuse(surface, exchange, error)
                return
            if kept is not None:
                metrics.requests.labels(surface.route, str(kept.status)).inc()
                await _replay(exchange, kept)
                return
        except ClientGone:
            return
        finally:
            exchange.done()
        claim = Claim(self._database, claim_id)
        try:
            await self._pipeline.serve(surface, Recorder(exchange, principal, body, claim))
        finally:
            await claim.settle(None)

    async def _asked(
        self, principal: Principal, key: str, route: str, body: bytes
    ) -> tuple[str, Kept | None]:
        try:
            return await asyncio.to_thread(self._claim, principal, key, route, body)
        except SQLAlchemyError:
            raise DependencyDown(
                "The Idempotency-Key cannot be looked up: the database does not answer.",
                next_step="Try again shortly, or send the request without the key.",
                retry_after_s=2.0,
            ) from None

    def _claim(
        self, principal: Principal, key: str, route: str, body: bytes
    ) -> tuple[str, Kept | None]:
        with self._database.transaction() as session:
            return idempotency.claim(
                session,
                tenant_id=principal.tenant_id,
                project_id=principal.project_id,
                key=key,
                route=route,
                body=body,
                now=self._clock.now(),
                longest=timedelta(seconds=self._pipeline.limits.timeout_s + _SPARE_S),
            )


class Claim:
    """A request's claim on its key, settled once: with a response to store, or released."""

    def __init__(self, database: Database, claim_id: str) -> None:
        self._database = database
        self._id = claim_id
        self._settled = False

    async def settle(self, answer: Kept | None) -> None:
        if self._settled:
            return
        self._settled = True
        try:
            await asyncio.shield(asyncio.to_thread(self._write, answer))
        except SQLAlchemyError:
            # The request is complete and billed, so the client gets its response. A repetition is
            # told that the first is still running, until the claim is old enough to be abandoned.
            log.warning("the claim %s of an Idempotency-Key was not settled", self._id)

    def _write(self, answer: Kept | None) -> None:
        with self._database.transaction() as session:
            if answer is None:
                idempotency.let_go(session, self._id)
            else:
                idempotency.keep(session, self._id, answer)


class Recorder(Exchange):
    """Forwards to the client's exchange and records the response."""

    def __init__(self, outer: Exchange, principal: Principal, body: bytes, claim: Claim) -> None:
        self._outer = outer
        self._claim = claim
        self.scope, self.headers, self.repeated = outer.scope, outer.headers, outer.repeated
        self.principal = principal
        self._body = body
        self._status = 0
        self._headers: Headers = []
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def started(self) -> bool:  # type: ignore[override]
        return self._outer.started

    @property
    def gone(self) -> bool:  # type: ignore[override]
        return self._outer.gone

    async def body(self, limit: int) -> bytes:
        return self._body

    def on_disconnect(self, call: Callable[[], None]) -> None:
        self._outer.on_disconnect(call)

    def done(self) -> None:
        self._outer.done()

    async def start(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers
        await self._outer.start(status, headers)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        self._note(data)
        if not more:
            await self._claim.settle(self._kept())
        await self._outer.write(data, more=more)

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        self._status, self._headers = status, headers
        self._note(body)
        await self._claim.settle(self._kept())
        await self._outer.answer(status, headers, body)

    def _kept(self) -> Kept | None:
        good = 0 < self._status < 500 and self._status not in _NOT_KEPT
        if not good or self.broken or self._size > MOST_BYTES:
            return None
        headers = [(name.decode(), value.decode("latin-1")) for name, value in self._headers]
        return Kept(self._status, headers, b"".join(self._parts))

    def _note(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MOST_BYTES:
            self._parts.append(data)
        else:
            self._parts.clear()


def _key_of(exchange: Exchange) -> str:
    key = exchange.header(HEADER) or ""
    fine = 0 < len(key) <= _LONGEST_KEY and key.isascii() and key.isprintable()
    if not fine or HEADER in exchange.repeated:
        raise BadRequest(
            f"Idempotency-Key must be a single header of 1 to {_LONGEST_KEY} printable ASCII "
            "characters.",
            next_step="Send a UUID, for example.",
            param="Idempotency-Key",
            code="invalid_value",
        )
    return key


async def _refuse(surface: Surface, exchange: Exchange, error: TollhouseError) -> None:
    metrics.rejections.labels(error.code).inc()
    metrics.requests.labels(surface.route, str(int(error.status))).inc()
    request_id = new_id(REQUEST)
    headers = answer_headers(request_id, 0, refusal_headers(error))
    body = orjson.dumps(surface.error(error, request_id))
    await exchange.answer(int(error.status), headers, body)


async def _replay(exchange: Exchange, kept: Kept) -> None:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in kept.headers]
    headers.append((b"idempotency-replayed", b"true"))
    if any(name == b"content-type" for name, _ in headers):  # a stream
        await exchange.start(kept.status, headers)
        await exchange.write(kept.answer, more=False)
    else:
        await exchange.answer(kept.status, headers, kept.answer)
