"""/v1/batches in OpenAI's format: requests that run below all interactive ones."""

import asyncio
from datetime import datetime
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from msgspec import Meta

from core.batches import jobs
from core.batches.models import Batch
from core.clock import Clock
from core.database import Database
from core.errors import BadRequest, UnsupportedParameter
from core.tenants.keys import Principal
from gateway.edge.decoding import Metadata
from gateway.edge.decoding import Request as Body
from gateway.formats.registry import batch_surfaces
from gateway.serving.api.bodies import read_body
from gateway.serving.api.dependencies import ClockDep, CountedCaller, DatabaseDep, LimitsDep
from gateway.serving.api.files import list_page

router = APIRouter(prefix="/v1", tags=["batches"])
_ENDPOINTS = [surface.route for surface in batch_surfaces()]
# Final statuses; `<status>_at` says when a batch reached one.
_FINAL_STATUSES = ("completed", "failed", "expired", "cancelled")


class BatchBody(Body, kw_only=True):
    input_file_id: Annotated[str, Meta(min_length=1, max_length=80)]
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: Any = None


_decoder = msgspec.json.Decoder(BatchBody)


@router.post("/batches")
async def create_batch(
    request: Request,
    caller: CountedCaller,
    limits: LimitsDep,
    database: DatabaseDep,
    clock: ClockDep,
) -> dict[str, Any]:
    body = await read_body(request, limits, _decoder)
    if body.endpoint not in _ENDPOINTS:
        raise BadRequest(
            f"endpoint is {body.endpoint[:80]!r}, which batches do not serve.",
            next_step=f"Set endpoint to one of {', '.join(_ENDPOINTS)}.",
            param="endpoint",
            code="invalid_value",
        )
    if body.completion_window != "24h":
        raise BadRequest(
            f"completion_window is {body.completion_window[:80]!r}; only 24h is supported.",
            next_step="Set completion_window to 24h.",
            param="completion_window",
            code="invalid_value",
        )
    if body.output_expires_after is not None:
        raise UnsupportedParameter(
            "output_expires_after is not supported: results are kept for 30 days.",
            next_step="Remove output_expires_after.",
            param="output_expires_after",
        )
    return await asyncio.to_thread(_create, database, clock, caller, body)


@router.get("/batches")
def list_batches(
    database: DatabaseDep,
    caller: CountedCaller,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    with database.read() as session:
        rows = jobs.all_of(session, caller.scope, _ENDPOINTS, after=after, limit=limit + 1)
    return list_page([batch_json(each) for each in rows], limit)


@router.get("/batches/{batch_id}")
def get_batch(batch_id: str, database: DatabaseDep, caller: CountedCaller) -> dict[str, Any]:
    with database.read() as session:
        return batch_json(jobs.get(session, caller.scope, batch_id))


@router.post("/batches/{batch_id}/cancel")
def cancel_batch(
    batch_id: str, database: DatabaseDep, clock: ClockDep, caller: CountedCaller
) -> dict[str, Any]:
    with database.transaction() as session:
        return batch_json(jobs.cancel(session, caller.scope, clock, batch_id))


def batch_json(batch: Batch) -> dict[str, Any]:
    result: dict[str, Any] = {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": _seconds(batch.created_at),
        "in_progress_at": _seconds(batch.in_progress_at),
        "expires_at": _seconds(batch.expires_at),
        "finalizing_at": _seconds(batch.finalizing_at),
        "cancelling_at": _seconds(batch.cancelling_at),
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed + jobs.unrun(batch),
        },
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
        "metadata": batch.labels or None,
    }
    for end in _FINAL_STATUSES:
        result[f"{end}_at"] = _seconds(batch.ended_at) if batch.status == end else None
    return result | {"model": batch.model}


def _create(database: Database, clock: Clock, caller: Principal, body: BatchBody) -> dict[str, Any]:
    with database.transaction() as session:
        result = jobs.create(
            session,
            caller.scope,
            clock,
            project_id=caller.project_id,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            labels=body.metadata or {},
        )
        return batch_json(result)


def _seconds(moment: datetime | None) -> int | None:
    return int(moment.timestamp()) if moment is not None else None
