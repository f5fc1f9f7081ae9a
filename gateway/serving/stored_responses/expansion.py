"""A request on /v1/responses with the stored items that it builds on in its body."""

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy.exc import SQLAlchemyError

from core.clock import Clock
from core.database import Database
from core.errors import BadRequest, DependencyDown
from core.responses import records
from core.responses.conversations import Conversations
from core.sealing import Sealer
from core.storage import StorageQuotas
from core.tenants.keys import Principal
from gateway.request.storing import may_store

_TYPES: dict[str, type] = {"previous_response_id": str, "store": bool, "background": bool}
Item = dict[str, Any]


@dataclass(kw_only=True)
class ResponseStore:
    database: Database
    clock: Clock
    sealer: Sealer
    quotas: StorageQuotas

    async def check_room(self, principal: Principal, adding: int) -> None:
        """InsufficientQuota if what a request wants to store does not fit."""
        tenant_id, plan = principal.tenant_id, principal.plan
        if self.quotas.has_room(tenant_id, plan, adding):
            return

        def _check() -> None:
            with self.database.read() as session:
                self.quotas.check(session, tenant_id, plan, adding)

        try:
            await asyncio.to_thread(_check)
        except SQLAlchemyError:
            raise unreachable() from None


@dataclass(frozen=True, slots=True)
class Expanded:
    body: bytes  # for the pipeline, with all items
    own: list[Item]  # the items of this request
    fields: dict[str, Any]  # of the response, which the body does not say
    conversation_id: str | None
    background: bool
    streamed: bool  # the client asked for a stream


async def expand(store: ResponseStore, principal: Principal, body: dict[str, Any]) -> Expanded:
    """Takes what the pipeline does not know out of the body."""
    given = {name: body.pop(name, None) for name in _TYPES}
    for name, kind in _TYPES.items():
        if not isinstance(given[name], kind | None):
            raise _wrong(name)
    conversation_id = _conversation_id(body.pop("conversation", None))
    previous, background = given["previous_response_id"], bool(given["background"])
    _check(given, conversation_id, may_store(principal))
    own, before = _items_of(body.get("input")), list[Item]()
    if previous or conversation_id or any(_is_reference(each) for each in own):
        try:
            before, own = await asyncio.to_thread(
                _read, store, principal, previous, conversation_id, own
            )
        except SQLAlchemyError:
            raise unreachable() from None
    fields: dict[str, Any] = {
        "store": may_store(principal) and given["store"] is not False,
        "previous_response_id": previous,
    }
    if conversation_id:
        fields["conversation"] = {"id": conversation_id}
    if before or own:
        body["input"] = [*before, *own]
    streamed = body.get("stream") is True
    if background and body.get("stream") in (None, False):
        body["stream"] = True  # its events are stored
    return Expanded(orjson.dumps(body), own, fields, conversation_id, background, streamed)


def _check(given: dict[str, Any], conversation_id: str | None, allowed: bool) -> None:
    if given["store"] is True and not allowed:
        raise BadRequest(
            "The organisation's settings do not allow storing responses.",
            next_step="Set store to false.",
            param="store",
            code="store_not_allowed",
        )
    if given["background"] and (given["store"] is False or not allowed):
        raise BadRequest(
            "A background response is stored until it is read, and this one is not to be stored.",
            next_step="Send it without background, or let it be stored.",
            param="background",
            code="store_not_allowed",
        )
    if conversation_id and given["previous_response_id"]:
        raise BadRequest(
            "conversation and previous_response_id exclude each other.",
            next_step="Send one of them.",
            param="conversation",
            code="invalid_value",
        )


def _conversation_id(given: Any) -> str | None:
    name = given.get("id") if isinstance(given, dict) and set(given) == {"id"} else given
    if name is not None and not (isinstance(name, str) and name):
        raise _wrong("conversation")
    return name


def _wrong(param: str) -> BadRequest:
    return BadRequest(
        f"{param} has the wrong type.",
        next_step=f"Correct {param}.",
        param=param,
        code="invalid_value",
    )


def _read(
    store: ResponseStore,
    principal: Principal,
    previous: str | None,
    conversation_id: str | None,
    own: list[Item],
) -> tuple[list[Item], list[Item]]:
    now = store.clock.now()
    with store.database.read() as session:
        args = (session, store.sealer, principal.scope)
        if conversation_id is not None:
            before = Conversations(*args, now).items(conversation_id)
        else:
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


def _items_of(given: Any) -> list[Item]:
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"type": "message", "role": "user", "content": content}]
    if isinstance(given, list) and all(isinstance(each, dict) for each in given):
        return list(given)
    return []  # as it is wrong, the pipeline says how


def _is_reference(item: Item) -> bool:
    named = isinstance(item.get("id"), str)
    return named and item.get("type", "item_reference") == "item_reference" and "role" not in item


def unreachable() -> DependencyDown:
    return DependencyDown(
        "Stored responses cannot be read: the database does not answer.",
        next_step="Try again shortly, or send all items in input.",
        retry_after_s=2.0,
    )
