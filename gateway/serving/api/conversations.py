"""/v1/conversations: items that responses build on and append to, in OpenAI's format."""

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request

from core.errors import BadRequest
from core.responses.conversations import Conversations
from gateway.edge.decoding import parse_body
from gateway.formats.responses.request import ItemsBody, parse_items
from gateway.request.storing import may_store
from gateway.serving.api.bodies import read_raw
from gateway.serving.api.dependencies import LimitsDep
from gateway.serving.api.sealed_store import SealedStore, item_page, listed_item

router = APIRouter(prefix="/v1/conversations", tags=["conversations"])
MAX_ADDED = 20  # items of one request, as in OpenAI's API


class _Store(SealedStore[Conversations]):
    records = Conversations


StoreDep = Annotated[_Store, Depends(_Store)]


@router.post("")
async def create_conversation(request: Request, store: StoreDep, limits: LimitsDep) -> Any:
    if not may_store(store.caller):
        raise BadRequest(
            "The organisation's settings do not allow storing conversations.",
            next_step="Send all items in the input of each request.",
            code="store_not_allowed",
        )
    raw = await read_raw(request, limits) or b"{}"
    body, items = await _items_of(raw)

    def _create(found: Conversations) -> dict[str, Any]:
        row = found.create(store.caller, dict(body.metadata or {}))
        found.add(row.id, items)
        return found.describe(row)

    return await asyncio.to_thread(store.grow, len(raw), _create)


@router.get("/{conversation_id}")
def get_conversation(conversation_id: str, store: StoreDep) -> dict[str, Any]:
    return store.read(lambda found: found.describe(found.get(conversation_id)))


@router.post("/{conversation_id}")
async def update_conversation(
    conversation_id: str, request: Request, store: StoreDep, limits: LimitsDep
) -> dict[str, Any]:
    raw = await read_raw(request, limits)
    body, items = await _items_of(raw)
    if items or body.metadata is None:
        raise BadRequest(
            "A conversation's metadata is what can be changed.",
            next_step=f"Send metadata; items go to /v1/conversations/{conversation_id[:80]}/items.",
            param="items" if items else "metadata",
            code="invalid_value",
        )
    metadata = dict(body.metadata)
    return await asyncio.to_thread(
        store.grow,
        len(raw),
        lambda found: found.describe(found.update(conversation_id, metadata)),
    )


@router.delete("/{conversation_id}")
def delete_conversation(conversation_id: str, store: StoreDep) -> dict[str, Any]:
    store.change(lambda found: found.remove(conversation_id))
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.post("/{conversation_id}/items")
async def add_items(
    conversation_id: str, request: Request, store: StoreDep, limits: LimitsDep
) -> dict[str, Any]:
    raw = await read_raw(request, limits)
    body, items = await _items_of(raw)
    if not items or body.metadata is not None:
        raise BadRequest(
            "items is missing." if not items else "Items are added without metadata.",
            next_step="Send items, a list of messages, function calls or their outputs.",
            param="items" if not items else "metadata",
            code="missing_required_parameter" if not items else "invalid_value",
        )
    added = await asyncio.to_thread(
        store.grow, len(raw), lambda found: found.add(conversation_id, items)
    )
    return item_page(added, after=None, limit=MAX_ADDED, order="asc")


@router.get("/{conversation_id}/items")
def list_items(
    conversation_id: str,
    store: StoreDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    items = store.read(lambda found: found.items(conversation_id))
    return item_page(items, after=after, limit=limit, order=order)


@router.get("/{conversation_id}/items/{item_id}")
def get_item(conversation_id: str, item_id: str, store: StoreDep) -> dict[str, Any]:
    return listed_item(store.read(lambda found: found.item(conversation_id, item_id)))


@router.delete("/{conversation_id}/items/{item_id}")
def delete_item(conversation_id: str, item_id: str, store: StoreDep) -> dict[str, Any]:
    return store.change(lambda found: found.describe(found.remove_item(conversation_id, item_id)))


async def _items_of(raw: bytes) -> tuple[ItemsBody, list[dict[str, Any]]]:
    """The checked body, and its items as the client sent them."""
    body = await parse_body(parse_items, raw)
    if len(body.items or ()) > MAX_ADDED:
        raise BadRequest(
            f"items has {len(body.items or ())} items; at most {MAX_ADDED} are added at once.",
            next_step="Add them in several requests.",
            param="items",
            code="invalid_value",
        )
    return body, (msgspec.json.decode(raw).get("items") or []) if body.items else []
