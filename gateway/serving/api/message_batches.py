"""/v1/messages/batches: Anthropic's Message Batches, run as the batches of /v1/batches are."""

import asyncio
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any

import msgspec
import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from msgspec import Meta
from sqlalchemy.orm import Session

from core.batches import files, jobs
from core.batches.models import Batch
from core.clock import Clock
from core.errors import BadRequest, Conflict, NotFound
from core.tenants.keys import Principal
from gateway.edge.api_errors import ROUTE
from gateway.edge.decoding import Request as Body
from gateway.serving.api.bodies import read_body
from gateway.serving.api.dependencies import (
    ClockDep,
    CountedCaller,
    DatabaseDep,
    LimitsDep,
    QuotasDep,
    SettingsDep,
)
from gateway.serving.batches.lines import CANCELLED

router = APIRouter(prefix="/v1/messages/batches", tags=["batches"])
_MAX_REQUESTS = 50_000
_LIFETIME_S = 30 * 86_400
_PREFIX, _OWN_PREFIX = "msgbatch_", "batch_"


class BatchedRequest(Body, kw_only=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=64)]
    params: dict[str, Any]


class MessageBatchBody(Body, kw_only=True):
    requests: Annotated[list[BatchedRequest], Meta(min_length=1, max_length=_MAX_REQUESTS)]


_decoder = msgspec.json.Decoder(MessageBatchBody)


@router.post("")
async def create_message_batch(
    request: Request,
    caller: CountedCaller,
    limits: LimitsDep,
    database: DatabaseDep,
    clock: ClockDep,
    quotas: QuotasDep,
) -> dict[str, Any]:
    body = await read_body(request, limits, _decoder)

    def _created() -> dict[str, Any]:
        lines = _checked_lines(body)
        size = sum(map(len, lines))
        with database.transaction() as session:
            quotas.check(session, caller.tenant_id, caller.plan, size)
            return _create(session, clock, caller, lines)

    return await asyncio.to_thread(_created)


@router.get("")
def list_message_batches(
    database: DatabaseDep,
    caller: CountedCaller,
    after_id: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> dict[str, Any]:
    after = _own_id(after_id) if after_id else None
    with database.read() as session:
        rows = jobs.all_of(session, caller.scope, [ROUTE], after=after, limit=limit + 1)
    data = [_shown(each) for each in rows[:limit]]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"data": data, "has_more": len(rows) > limit, "first_id": None, "last_id": None} | ends


@router.get("/{batch_id}")
def get_message_batch(
    batch_id: str, database: DatabaseDep, caller: CountedCaller
) -> dict[str, Any]:
    with database.read() as session:
        return _shown(jobs.get(session, caller.scope, _own_id(batch_id)))


@router.post("/{batch_id}/cancel")
def cancel_message_batch(
    batch_id: str, database: DatabaseDep, clock: ClockDep, caller: CountedCaller
) -> dict[str, Any]:
    with database.transaction() as session:
        return _shown(jobs.cancel(session, caller.scope, clock, _own_id(batch_id)))


@router.delete("/{batch_id}")
def delete_message_batch(
    batch_id: str, database: DatabaseDep, clock: ClockDep, caller: CountedCaller
) -> dict[str, Any]:
    with database.transaction() as session:
        batch = jobs.get(session, caller.scope, _own_id(batch_id))
        if batch.status in jobs.OPEN:
            raise Conflict("The batch still runs.", next_step="Cancel it first.")
        for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                files.remove(session, caller.scope, file_id, clock.now())
        session.delete(batch)
    return {"id": batch_id, "type": "message_batch_deleted"}


@router.get("/{batch_id}/results")
def message_batch_results(
    batch_id: str,
    database: DatabaseDep,
    clock: ClockDep,
    settings: SettingsDep,
    caller: CountedCaller,
) -> StreamingResponse:
    """JSON Lines, in no particular order."""
    with database.read() as session:
        batch = jobs.get(session, caller.scope, _own_id(batch_id))
        if batch.status in jobs.OPEN:
            raise NotFound(
                "The batch has no results yet.", next_step="Wait until processing_status is ended."
            )
        names = [each for each in (batch.output_file_id, batch.error_file_id) if each is not None]
        found = [files.get(session, caller.scope, each, clock.now()) for each in names]
    longest = settings.max_file_mb << 20

    def _lines() -> Iterator[bytes]:
        for file in found:
            with database.read() as session:
                for line in files.lines(session, file, longest):
                    yield _result(orjson.loads(line))

    return StreamingResponse(_lines(), media_type="application/x-jsonl")


def _checked_lines(body: MessageBatchBody) -> list[bytes]:
    """The lines of the batch's input file."""
    seen: set[str] = set()
    for each in body.requests:
        if each.custom_id in seen:
            raise BadRequest(
                f"custom_id {each.custom_id!r} is used twice.",
                next_step="Give each request an id of its own.",
                param="requests[].custom_id",
            )
        seen.add(each.custom_id)
        if not isinstance(each.params.get("model"), str) or each.params.get("stream"):
            raise BadRequest(
                f"The params of {each.custom_id!r} name no model, or ask for a stream.",
                next_step="Set model, and leave stream out.",
                param="requests[].params",
            )
    return [
        orjson.dumps(
            {"custom_id": each.custom_id, "method": "POST", "url": ROUTE, "body": each.params}
        )
        + b"\n"
        for each in body.requests
    ]


def _create(
    session: Session, clock: Clock, caller: Principal, lines: list[bytes]
) -> dict[str, Any]:
    file = files.store(
        session,
        clock,
        tenant_id=caller.tenant_id,
        project_id=caller.project_id,
        key_id=caller.key_id,
        filename="message_batch.jsonl",
        purpose="batch",
        content=lines,
        lifetime_s=_LIFETIME_S,
    )
    batch = jobs.create(
        session,
        caller.scope,
        clock,
        project_id=caller.project_id,
        endpoint=ROUTE,
        input_file_id=file.id,
        labels={},
    )
    batch.total = len(lines)
    return _shown(batch)


def _own_id(batch_id: str) -> str:
    return _OWN_PREFIX + batch_id.removeprefix(_PREFIX)


def _shown(batch: Batch) -> dict[str, Any]:
    if batch.endpoint != ROUTE:
        raise NotFound(
            f"There is no message batch {batch.id}.", next_step="See GET /v1/messages/batches."
        )
    shown_id = _PREFIX + batch.id.removeprefix(_OWN_PREFIX)
    status = {"cancelling": "canceling"}.get(batch.status, "in_progress")
    ended = batch.status not in jobs.OPEN
    left = batch.total - batch.completed - batch.failed
    counts = {
        "processing": 0 if ended else left,
        "succeeded": batch.completed,
        "errored": batch.failed,
        "canceled": jobs.unrun(batch) if batch.status == "cancelled" else 0,
        "expired": jobs.unrun(batch) if batch.status == "expired" else 0,
    }
    return {
        "id": shown_id,
        "type": "message_batch",
        "processing_status": "ended" if ended else status,
        "request_counts": counts,
        "created_at": _moment(batch.created_at),
        "expires_at": _moment(batch.expires_at),
        "ended_at": _moment(batch.ended_at),
        "cancel_initiated_at": _moment(batch.cancelling_at),
        "archived_at": None,
        "results_url": f"{router.prefix}/{shown_id}/results" if ended else None,
    }


def _result(line: dict[str, Any]) -> bytes:
    response = line["response"]
    result: dict[str, Any]
    if response is None:
        cancelled = line["error"]["code"] == CANCELLED
        result = {"type": "canceled" if cancelled else "expired"}
    elif response["status_code"] < 400:
        result = {"type": "succeeded", "message": response["body"]}
    else:
        error = response["body"]
        if error.get("type") != "error":  # of a key that is no longer accepted
            told = {"type": "authentication_error", "message": error["error"]["message"]}
            error = {"type": "error", "error": told, "request_id": response["request_id"] or None}
        result = {"type": "errored", "error": error}
    return orjson.dumps({"custom_id": line["custom_id"], "result": result}) + b"\n"


def _moment(moment: datetime | None) -> str | None:
    if moment is None:
        return None
    return moment.replace(tzinfo=None).isoformat(timespec="seconds") + "Z"
