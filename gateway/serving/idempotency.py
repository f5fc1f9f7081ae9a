"""Idempotency-Key: a repeated request gets the stored response and is not billed again.

Successful responses and client errors are stored for a day. Server errors, rate limits and
disconnects are not: the next attempt runs as new. The claim is settled before the last byte is sent,
so that an immediate retry sees the result.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import orjson
from sqlalchemy.exc import SQLAlchemyError

from core import idempotency, metrics
from core.database import Database
from core.errors import BadRequest, DependencyDown, TollhouseError
from core.idempotency import MAX_RESPONSE_BYTES, StoredResponse
from core.ids import REQUEST, new_id
from core.responses.end_users import end_users_of, keys_of
from core.tenants.keys import Principal
from gateway.admission.request import AdmissionRequest
from gateway.admission.request_rate import RequestRate
from gateway.answers.surface import Surface
from gateway.catalog.catalog import Catalog
from gateway.edge.threads import Work, run_as
from gateway.request.exchange import ClientDisconnected, Exchange, Headers
from gateway.serving.headers import error_headers, response_headers
from gateway.serving.relay import RelayExchange
from gateway.serving.responses import Server
from gateway.serving.stored_responses.expansion import ResponseStore

log = logging.getLogger(__name__)
HEADER = b"idempotency-key"
_MAX_KEY_LENGTH = 255
_NOT_STORED = (401, 403, 408, 409, 429)
_CLAIM_GRACE_S = 60.0  # beyond the request timeout, before a claim is considered abandoned


class IdempotencyKeys:
    """The keys of a process's tenants, in the database."""

    def __init__(
        self,
        store: ResponseStore,
        rate: RequestRate,
        *,
        longest_s: float,
        max_keys: int,
    ) -> None:
        """`longest_s` is the longest that a request may run; `max_keys` is the limit on a tenant's
        keys in 24 hours."""
        self._database = store.database
        self._rate = rate
        self._quotas = store.quotas
        self._sealer = store.sealer
        self._clock = store.clock
        self._longest = timedelta(seconds=longest_s + _CLAIM_GRACE_S)
        self._max_keys = max_keys

    async def claim(
        self,
        exchange: Exchange,
        principal: Principal,
        route: str,
        body: bytes,
        end_users: Callable[[], tuple[str, ...]],
    ) -> "Claim | StoredResponse":
        """The claim of a first request, which the caller settles, or the response of a retry. `body`
        is what must be the same in a retry; `end_users` reads whom the request names, in a thread."""
        key = _read_key(exchange)
        try:
            claim_id, stored = await run_as(
                Work.IDEMPOTENCY, self._claim, principal, key, route, body
            )
        except SQLAlchemyError:
            raise DependencyDown(
                "The Idempotency-Key cannot be looked up: the database does not answer.",
                next_step="Try again shortly, or send the request without the key.",
                retry_after_s=2.0,
            ) from None
        if stored is None:
            added = partial(self._quotas.add, principal.tenant_id)

            def _whose() -> dict[str, str | None]:
                return keys_of(self._sealer, principal.tenant_id, end_users())

            return Claim(self._database, claim_id, added, _whose)
        # A replay counts as a request, which it is, though no engine runs.
        counted = AdmissionRequest.without_prompt(new_id(REQUEST), principal, "")
        await self._rate.count(counted)
        return stored

    def _claim(
        self, principal: Principal, key: str, route: str, body: bytes
    ) -> tuple[str, StoredResponse | None]:
        with self._database.transaction() as session:
            self._quotas.check(session, principal.tenant_id, principal.plan, 0)
            return idempotency.claim(
                session,
                tenant_id=principal.tenant_id,
                project_id=principal.project_id,
                key=key,
                route=route,
                body=body,
                now=self._clock.now(),
                longest=self._longest,
                max_keys=self._max_keys,
            )


class IdempotencyHandler:
    def __init__(self, pipeline: Server, keys: IdempotencyKeys, catalog: Catalog) -> None:
        self._pipeline = pipeline
        self._keys = keys
        self._catalog = catalog

    async def serve(self, surface: Surface, exchange: Exchange) -> None:
        try:
            try:
                principal = await self._pipeline.auth.principal(exchange, surface.route)
                body = await exchange.body(self._pipeline.limits.max_body)
                named = partial(_end_users, surface.route, body)
                claim = await self._keys.claim(exchange, principal, surface.route, body, named)
                if isinstance(claim, StoredResponse):
                    self._check_model(principal, body)
            except TollhouseError as error:
                await _send_error(surface, exchange, error)
                return
            if isinstance(claim, StoredResponse):
                metrics.requests.labels(surface.route, str(claim.status)).inc()
                await replay(exchange, claim)
                return
        except ClientDisconnected:
            return
        finally:
            exchange.done()
        try:
            await self._pipeline.serve(surface, Recorder(exchange, principal, body, claim))
        finally:
            await claim.settle(None)

    def _check_model(self, principal: Principal, body: bytes) -> None:
        """Forbidden if the key may not use the model of the stored response now."""
        asked = orjson.loads(body)
        model = asked.get("model") if isinstance(asked, dict) else None
        if isinstance(model, str):
            self._catalog.resolve(principal, model)


class Claim:
    """A request's claim on its key, settled once: with a response to store, or released."""

    def __init__(
        self,
        database: Database,
        claim_id: str,
        added: Callable[[int], None],
        whose: Callable[[], dict[str, str | None]],
    ) -> None:
        """`added` is called with the bytes of what is stored; `whose` gives the end users' columns."""
        self._database = database
        self._added = added
        self._whose = whose
        self._id = claim_id
        self._settled = False

    async def settle(self, answer: StoredResponse | None) -> None:
        if self._settled:
            return
        self._settled = True
        try:
            await asyncio.shield(run_as(Work.IDEMPOTENCY, self._write, answer))
        except SQLAlchemyError:
            # The request is complete and billed, so the client gets its response. A repetition is
            # answered that the first is still running, until the claim is old enough to be abandoned.
            log.warning("the claim %s of an Idempotency-Key was not settled", self._id)

    def _write(self, answer: StoredResponse | None) -> None:
        with self._database.transaction() as session:
            if answer is None:
                idempotency.release(session, self._id)
            else:
                idempotency.store_response(session, self._id, answer, self._whose())
                self._added(len(answer.answer))


class Recorder(RelayExchange):
    """Forwards to the client's exchange and records the response."""

    def __init__(self, outer: Exchange, principal: Principal, body: bytes, claim: Claim) -> None:
        super().__init__(outer, principal, body)
        self._claim = claim
        self._status = 0
        self._headers: Headers = []
        self._parts: list[bytes] = []
        self._size = 0

    async def start(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers
        await self._outer.start(status, headers)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        self._record(data)
        if not more:
            await self._claim.settle(self._stored_response())
        await self._outer.write(data, more=more)

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        self._status, self._headers = status, headers
        self._record(body)
        await self._claim.settle(self._stored_response())
        await self._outer.answer(status, headers, body)

    def _stored_response(self) -> StoredResponse | None:
        storable = 0 < self._status < 500 and self._status not in _NOT_STORED
        if not storable or self.broken or self._size > MAX_RESPONSE_BYTES:
            return None
        headers = [(name.decode(), value.decode("latin-1")) for name, value in self._headers]
        return StoredResponse(self._status, headers, b"".join(self._parts))

    def _record(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MAX_RESPONSE_BYTES:
            self._parts.append(data)
        else:
            self._parts.clear()


def _end_users(route: str, raw: bytes) -> tuple[str, ...]:
    try:
        body = orjson.loads(raw)
    except ValueError:
        return ()  # its answer is the error, which holds no text of theirs
    return end_users_of(route, body) if isinstance(body, dict) else ()


def _read_key(exchange: Exchange) -> str:
    key = exchange.header(HEADER) or ""
    valid = 0 < len(key) <= _MAX_KEY_LENGTH and key.isascii() and key.isprintable()
    if not valid or HEADER in exchange.repeated:
        raise BadRequest(
            f"Idempotency-Key must be a single header of 1 to {_MAX_KEY_LENGTH} printable ASCII "
            "characters.",
            next_step="Send a UUID, for example.",
            param="Idempotency-Key",
            code="invalid_value",
        )
    return key


async def _send_error(surface: Surface, exchange: Exchange, error: TollhouseError) -> None:
    metrics.rejections.labels(error.code).inc()
    metrics.requests.labels(surface.route, str(int(error.status))).inc()
    request_id = new_id(REQUEST)
    headers = response_headers(request_id, 0, error_headers(error))
    body = orjson.dumps(surface.error(error, request_id))
    await exchange.answer(int(error.status), headers, body)


async def replay(exchange: Exchange, stored: StoredResponse) -> None:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in stored.headers]
    headers.append((b"idempotency-replayed", b"true"))
    if any(name == b"content-type" for name, _ in headers):  # a stream
        await exchange.start(stored.status, headers)
        await exchange.write(stored.answer, more=False)
    else:
        await exchange.answer(stored.status, headers, stored.answer)
