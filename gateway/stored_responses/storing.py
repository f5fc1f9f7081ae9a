"""Serves /v1/responses: reads the stored items that a request builds on, and stores its response.

The pipeline sees a request with all its items. The response is stored before its last byte is sent,
so that the next request finds it.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy.exc import SQLAlchemyError

from core.clock import Clock
from core.database import Database
from core.errors import BadRequest, DependencyDown, TollhouseError
from core.ids import REQUEST, new_id
from core.responses import records
from core.responses.records import Exchanged
from core.sealing import Sealer
from core.tenants.keys import Principal
from gateway.auth.authenticator import Authenticator
from gateway.http.exchange import ClientDisconnected, Exchange, Headers
from gateway.http.headers import error_headers, response_headers
from gateway.http.relay import RelayExchange
from gateway.inference.decoding import parse_body
from gateway.inference.surface import Surface
from gateway.pipeline import Pipeline
from gateway.responses import RequestLimits
from gateway.stored_responses.surface import StoredSurface

log = logging.getLogger("tollhouse.responses")
SETTING = "store_responses"  # of a tenant; false: nothing is stored
_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


@dataclass(kw_only=True)
class ResponseStore:
    database: Database
    clock: Clock
    sealer: Sealer


class StoringPipeline:
    def __init__(self, pipeline: Pipeline, store: ResponseStore) -> None:
        self._pipeline = pipeline
        self._store = store

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
            expanded = await self._expand(principal, body) if body is not None else None
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

    async def _expand(self, principal: Principal, body: dict[str, Any]) -> "_Expanded":
        allowed = principal.settings.get(SETTING, True) is not False
        previous, wanted = body.pop("previous_response_id", None), body.pop("store", None)
        if wanted is True and not allowed:
            raise BadRequest(
                "The organisation's settings do not allow to store responses.",
                next_step="Set store to false.",
                param="store",
                code="store_not_allowed",
            )
        if not isinstance(previous, str | None) or not isinstance(wanted, bool | None):
            param = "store" if isinstance(previous, str | None) else "previous_response_id"
            raise BadRequest(
                f"{param} has the wrong type.", next_step=f"Correct {param}.", param=param
            )
        own, before = _items_of(body.get("input")), list[dict[str, Any]]()
        if previous is not None or any(_is_reference(each) for each in own):
            try:
                before, own = await asyncio.to_thread(self._read, principal, previous, own)
            except SQLAlchemyError:
                raise _unreachable() from None
        fields = {
            "store": allowed and wanted is not False,
            "previous_response_id": previous,
        }
        if before or own:
            body["input"] = [*before, *own]
        return _Expanded(orjson.dumps(body), own, fields)

    def _read(
        self, principal: Principal, previous: str | None, own: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        store, now = self._store, self._store.clock.now()
        with store.database.read() as session:
            args = (session, store.sealer, principal.scope)
            before = records.history(*args, previous, now) if previous is not None else []
            known = {each.get("id"): each for each in before}
            resolved = [
                (known.get(each["id"]) or records.item(*args, each["id"], now))
                if _is_reference(each)
                else each
                for each in own
            ]
        # An item that the history holds already is not sent twice.
        return before, [each for each in resolved if each not in before]


@dataclass(frozen=True, slots=True)
class _Expanded:
    body: bytes  # for the pipeline, with all items
    own: list[dict[str, Any]]  # the items of this request
    fields: dict[str, Any]


class _SavingExchange(RelayExchange):
    def __init__(
        self,
        outer: Exchange,
        principal: Principal,
        expanded: _Expanded,
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
        if self._surface.finished is None or not self._expanded.fields["store"]:
            return
        try:
            await asyncio.shield(asyncio.to_thread(self._write, self._surface.finished))
        except SQLAlchemyError as error:
            # It is complete and billed, so the client gets it.
            log.warning("a response was not stored: %s", str(error).partition("\n")[0])

    def _write(self, response: dict[str, Any]) -> None:
        store = self._store
        items = [_with_id(each) for each in self._expanded.own]
        with store.database.transaction() as session:
            given = Exchanged(response, items)
            records.save(session, store.sealer, self._caller, given, store.clock.now())


def _object_of(raw: bytes) -> dict[str, Any] | None:
    try:
        body = orjson.loads(raw)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _items_of(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"type": "message", "role": "user", "content": content}]
    if isinstance(given, list) and all(isinstance(each, dict) for each in given):
        return list(given)
    return []  # as it is wrong, the pipeline says how


def _is_reference(item: dict[str, Any]) -> bool:
    named = isinstance(item.get("id"), str)
    return named and item.get("type", "item_reference") == "item_reference" and "role" not in item


def _with_id(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("id"):
        return item
    return {**item, "id": new_id(_PREFIXES.get(str(item.get("type")), "msg"))}


async def _send_error(surface: Surface, exchange: Exchange, error: TollhouseError) -> None:
    request_id = new_id(REQUEST)
    headers = response_headers(request_id, 0, error_headers(error))
    body = orjson.dumps(surface.error(error, request_id))
    try:
        await exchange.answer(int(error.status), headers, body)
    except ClientDisconnected:
        return


def _unreachable() -> DependencyDown:
    return DependencyDown(
        "Stored responses cannot be read: the database does not answer.",
        next_step="Try again shortly, or send all items in input.",
        retry_after_s=2.0,
    )
