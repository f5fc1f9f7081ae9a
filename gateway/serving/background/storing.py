"""Serves /v1/responses: reads the stored items that a request builds on, and stores its response.

The pipeline sees a request with all its items. The response is stored before its last byte is sent,
so that the next request finds it.
"""

import asyncio
import logging
from typing import Any

import orjson
from sqlalchemy.exc import SQLAlchemyError

from core.errors import TollhouseError
from core.ids import REQUEST, new_id
from core.responses import records
from core.responses.conversations import with_id
from core.responses.records import Exchanged
from core.tenants.keys import Principal
from gateway.answers.surface import Surface
from gateway.edge.auth.authenticator import Authenticator
from gateway.edge.decoding import parse_body
from gateway.request.exchange import ClientDisconnected, Exchange, Headers
from gateway.serving.background.responses import BackgroundResponses, StoredSurface
from gateway.serving.headers import error_headers, response_headers
from gateway.serving.relay import RelayExchange
from gateway.serving.responses import RequestLimits
from gateway.serving.stored_responses.conversation_items import append_to_conversation
from gateway.serving.stored_responses.expansion import Expanded, ResponseStore, expand

log = logging.getLogger("tollhouse.responses")


class StoringPipeline:
    def __init__(self, background: BackgroundResponses) -> None:
        self._background = background
        self._pipeline = background.pipeline
        self._store = background.store

    @property
    def auth(self) -> Authenticator:
        return self._pipeline.auth

    @property
    def limits(self) -> RequestLimits:
        return self._pipeline.limits

    async def serve(self, surface: Surface, exchange: Exchange) -> None:
        try:
            principal = await self.auth.principal(exchange, surface.route)
            raw = await exchange.body(self.limits.max_body)
            body = await parse_body(_object_of, raw)
            expanded = await expand(self._store, principal, body) if body is not None else None
            if expanded is not None and (expanded.fields["store"] or expanded.conversation_id):
                await self._store.check_room(principal, len(expanded.body))
            if expanded is not None and expanded.background:
                await self._background.serve(exchange, principal, expanded)
                exchange.done()
                return
        except ClientDisconnected:
            exchange.done()
            return
        except TollhouseError as error:
            await _send_error(surface, exchange, error)
            exchange.done()
            return
        if expanded is None:  # not an object: the pipeline says what is wrong
            await self._pipeline.serve(surface, RelayExchange(exchange, principal, raw))
            return
        own = StoredSurface(expanded.fields)
        relay = _SavingExchange(exchange, principal, expanded, own, self._store)
        await self._pipeline.serve(own, relay)


class _SavingExchange(RelayExchange):
    def __init__(
        self,
        outer: Exchange,
        principal: Principal,
        expanded: Expanded,
        surface: StoredSurface,
        store: ResponseStore,
    ) -> None:
        super().__init__(outer, principal, expanded.body)
        self._caller = principal
        self._expanded = expanded
        self._surface = surface
        self._store = store

    async def write(self, data: bytes, *, more: bool = True) -> None:
        if not more:
            await self._save()
        await super().write(data, more=more)

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        await self._save()
        await super().answer(status, headers, body)

    async def _save(self) -> None:
        finished, expanded = self._surface.finished, self._expanded
        if finished is None or not (expanded.fields["store"] or expanded.conversation_id):
            return
        try:
            await asyncio.shield(
                asyncio.to_thread(save_response, self._store, self._caller, expanded, finished)
            )
        except (SQLAlchemyError, TollhouseError) as error:
            # It is billed, so the client gets it.
            log.warning("a response was not stored: %s", str(error).partition("\n")[0])


def save_response(
    store: ResponseStore, caller: Principal, expanded: Expanded, response: dict[str, Any]
) -> None:
    """Stores a response, and appends its items to its conversation, unless it failed."""
    items, now = [with_id(each) for each in expanded.own], store.clock.now()
    adding = len(orjson.dumps([items, response]))
    with store.database.transaction() as session:
        store.quotas.check(session, caller.tenant_id, caller.plan, adding)
        if expanded.fields["store"]:
            given = Exchanged(response, items)
            records.save(session, store.sealer, caller, given, now)
        if expanded.conversation_id and response["status"] != "failed":
            append_to_conversation(session, store, caller.scope, items, response)


def _object_of(raw: bytes) -> dict[str, Any] | None:
    try:
        body = orjson.loads(raw)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


async def _send_error(surface: Surface, exchange: Exchange, error: TollhouseError) -> None:
    request_id = new_id(REQUEST)
    headers = response_headers(request_id, 0, error_headers(error))
    body = orjson.dumps(surface.error(error, request_id))
    try:
        await exchange.answer(int(error.status), headers, body)
    except ClientDisconnected:
        return
