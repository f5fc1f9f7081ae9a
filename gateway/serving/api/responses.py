"""/v1/responses/{id}: stored responses, in OpenAI's format."""

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse

from core.errors import UnsupportedParameter
from core.responses import records
from core.responses.records import Exchanged
from core.sealing import Sealer
from gateway.serving.api.dependencies import (
    BackgroundDep,
    ClockDep,
    CountedCaller,
    DatabaseDep,
    OperatorToken,
)
from gateway.serving.api.sealed_store import item_page
from gateway.serving.background.responses import with_charged_usage

router = APIRouter(prefix="/v1/responses", tags=["responses"])


@dataclass(frozen=True)
class _Stored:
    database: DatabaseDep
    clock: ClockDep
    token: OperatorToken
    caller: CountedCaller

    def get(self, response_id: str) -> Exchanged:
        with self.database.read() as session:
            sealer, now = Sealer(self.token), self.clock.now()
            return records.get(session, sealer, self.caller.scope, response_id, now)

    def with_usage(self, response: dict[str, Any]) -> dict[str, Any]:
        with self.database.read() as session:
            return with_charged_usage(session, self.caller.scope, response)


StoredDep = Annotated[_Stored, Depends(_Stored)]


@router.get("/{response_id}", response_model=None)
async def get_response(
    response_id: str,
    stored: StoredDep,
    background: BackgroundDep,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=-1, le=2**31 - 2)] = None,
) -> dict[str, Any] | StreamingResponse:
    found = (await asyncio.to_thread(stored.get, response_id)).response
    if not stream:
        return await asyncio.to_thread(stored.with_usage, found)
    if not found.get("background"):
        raise UnsupportedParameter(
            "The events of this response are not stored: it was not in the background.",
            next_step="GET it without stream.",
            param="stream",
        )
    first = 0 if starting_after is None else starting_after + 1
    events = background.tail(stored.caller.scope, response_id, first)
    return StreamingResponse(events, media_type="text/event-stream")


@router.post("/{response_id}/cancel")
async def cancel_response(
    response_id: str, stored: StoredDep, background: BackgroundDep
) -> dict[str, Any]:
    response = await background.cancel(stored.caller.scope, response_id)
    return await asyncio.to_thread(stored.with_usage, response)


@router.delete("/{response_id}")
def delete_response(
    response_id: str, database: DatabaseDep, clock: ClockDep, caller: CountedCaller
) -> dict[str, Any]:
    with database.transaction() as session:
        records.remove(session, caller.scope, response_id, clock.now())
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/{response_id}/input_items")
def list_input_items(
    response_id: str,
    stored: StoredDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    return item_page(stored.get(response_id).input, after=after, limit=limit, order=order)
