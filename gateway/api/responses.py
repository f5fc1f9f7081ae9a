"""/v1/responses/{id}: stored responses, in OpenAI's format."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query

from core.errors import UnsupportedParameter
from core.responses import records
from core.responses.records import Exchanged
from core.sealing import Sealer
from gateway.api.dependencies import Caller, ClockDep, DatabaseDep, OperatorToken

router = APIRouter(prefix="/v1/responses", tags=["responses"])


@dataclass(frozen=True)
class _Stored:
    database: DatabaseDep
    clock: ClockDep
    token: OperatorToken
    caller: Caller

    def get(self, response_id: str) -> Exchanged:
        with self.database.read() as session:
            sealer, now = Sealer(self.token), self.clock.now()
            return records.get(session, sealer, self.caller.scope, response_id, now)


StoredDep = Annotated[_Stored, Depends(_Stored)]


@router.get("/{response_id}")
def get_response(response_id: str, stored: StoredDep, stream: bool = False) -> dict[str, Any]:
    if stream:
        raise UnsupportedParameter(
            "A stored response cannot be streamed again.",
            next_step="GET it without stream.",
            param="stream",
        )
    return stored.get(response_id).response


@router.delete("/{response_id}")
def delete_response(
    response_id: str, database: DatabaseDep, clock: ClockDep, caller: Caller
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
    items = [_listed(each) for each in stored.get(response_id).input]
    if order == "desc":
        items.reverse()
    ids = [each["id"] for each in items]
    begin = ids.index(after) + 1 if after in ids else 0
    page = items[begin : begin + limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    return {"object": "list", "data": page, "has_more": begin + limit < len(items)} | ends


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """A message's content is a list of parts, also where the client wrote a text."""
    if isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item = {**item, "content": [{"type": kind, "text": item["content"]}]}
    return {"type": "message", **item}
