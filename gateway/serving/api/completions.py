"""/v1/chat/completions: stored completions, in OpenAI's format."""

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request

from core.responses.completions import Completions, Listing
from gateway.edge.decoding import Metadata
from gateway.edge.decoding import Request as Body
from gateway.serving.api.bodies import read_body, reads_query
from gateway.serving.api.dependencies import LimitsDep
from gateway.serving.api.errors import unsupported_endpoint
from gateway.serving.api.sealed_store import SealedStore

router = APIRouter(prefix="/v1/chat/completions", tags=["stored completions"])
_LABEL = "metadata["
Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]


class MetadataBody(Body):
    metadata: Metadata | None


_decoder = msgspec.json.Decoder(MetadataBody)


class _Store(SealedStore[Completions]):
    records = Completions


StoreDep = Annotated[_Store, Depends(_Store)]


@router.get("")
@reads_query("metadata[")
def list_completions(
    request: Request,
    store: StoreDep,
    after: str | None = None,
    limit: Limit = 20,
    order: Order = "asc",
    model: str | None = None,
) -> dict[str, Any]:
    """Stored completions; `metadata[name]=value` chooses those with a label."""
    labels = {
        name[len(_LABEL) : -1]: value
        for name, value in request.query_params.multi_items()
        if name.startswith(_LABEL) and name.endswith("]")
    }
    wanted = Listing(after, limit, order == "desc", model, labels)
    found, more = store.read(lambda stored: stored.page(wanted))
    return _page(found, has_more=more)


@router.get("/{completion_id}")
def get_completion(completion_id: str, store: StoreDep) -> dict[str, Any]:
    return store.read(lambda stored: stored.get(completion_id))


@router.get("/{completion_id}/messages")
def list_messages(
    completion_id: str,
    store: StoreDep,
    after: str | None = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> dict[str, Any]:
    found = [_message(each) for each in store.read(lambda stored: stored.messages(completion_id))]
    if order == "desc":
        found.reverse()
    ids = [each["id"] for each in found]
    begin = ids.index(after) + 1 if after in ids else 0
    return _page(found[begin : begin + limit], has_more=begin + limit < len(found))


@router.post("/batch", include_in_schema=False)
def refuse_batch() -> None:
    """vLLM's route for several conversations, whose name is not that of a stored completion."""
    raise unsupported_endpoint("/v1/chat/completions/batch")


@router.post("/{completion_id}")
async def update_completion(
    completion_id: str, request: Request, store: StoreDep, limits: LimitsDep
) -> dict[str, Any]:
    """Replace the labels of a stored completion."""
    body = await read_body(request, limits, _decoder)
    metadata = dict(body.metadata or {})
    return await asyncio.to_thread(
        store.change, lambda stored: stored.update(completion_id, metadata)
    )


@router.delete("/{completion_id}")
def delete_completion(completion_id: str, store: StoreDep) -> dict[str, Any]:
    store.change(lambda stored: stored.remove(completion_id))
    return {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}


def _page(found: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": found,
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
        "has_more": has_more,
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Texts in `content`, parts in `content_parts`."""
    content = message.get("content")
    if not isinstance(content, list):
        return {"refusal": None, "content_parts": None, **message, "content": content}
    text = "".join(part.get("text", "") for part in content) or None
    return {"refusal": None, **message, "content": text, "content_parts": content}
