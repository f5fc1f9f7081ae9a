"""/v1/organization/usage and /costs in OpenAI's format, and /v1/exports as streamed files."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response, StreamingResponse
from sqlalchemy import select

from billing.buckets import BucketQuery, usage_buckets
from billing.exports import schedules
from billing.exports.documents import job_json, schedule_json
from billing.exports.formats import Format
from billing.exports.subjects import Period
from billing.exports.writing import NAMES, check_name, chunks_of, format_of
from billing.models import ExportJob
from core.errors import BadRequest
from core.events import UsageKind
from gateway.api.admin.access import Allowed, Visit
from gateway.moments import moment_of
from gateway.schemas import finance as shapes

router = APIRouter(prefix="/v1", tags=["finance"])
ReadsUsage = Annotated[Visit, Depends(Allowed("usage", "read"))]
ReadsCosts = Annotated[Visit, Depends(Allowed("costs", "read"))]
Exports = Annotated[Visit, Depends(Allowed("exports", "read"))]


@router.get("/organization/usage/completions")
def completions_usage(request: Request, visit: ReadsUsage) -> Response:
    """Tokens and requests of generations in buckets of 1m, 1h or 1d."""
    parameters = _parameters(request)
    query, groups = shapes.usage_query(parameters, visit.services.clock.now())
    kinds = (UsageKind.GENERATION.value,)
    return _json(shapes.usage_page(_buckets(visit, query, kinds), groups))


@router.get("/organization/costs")
def costs(request: Request, visit: ReadsCosts) -> Response:
    """Charges per day, before tax and credits."""
    parameters = _parameters(request)
    query, groups = shapes.costs_query(parameters, visit.services.clock.now())
    return _json(shapes.costs_page(_buckets(visit, query, ()), groups))


@router.get("/exports")
def export(
    visit: Exports,
    what: Annotated[str, Query(description=f"One of {', '.join(NAMES)}.")] = "usage",
    format: Annotated[str, Query(description="csv, jsonl or parquet.")] = "csv",
    start: Annotated[str | None, Query(description="First day or time, UTC, inclusive.")] = None,
    end: Annotated[str | None, Query(description="Last day or time, UTC, exclusive.")] = None,
) -> StreamingResponse:
    """Download the tenant's usage, charges, invoices or ledger, or a FOCUS 1.2 file."""
    check_name(what)
    form = format_of(format)
    period = _period(visit.services.clock.now(), start, end)
    name = f"tollhouse-{what}-{period.start:%Y%m%d}-{period.end:%Y%m%d}.{form.value}"
    return StreamingResponse(
        _rows(visit, what, form, period),
        media_type=form.media_type,
        headers={"content-disposition": f'attachment; filename="{name}"'},
    )


@router.get("/exports/schedules")
def export_schedules(visit: Exports) -> dict[str, Any]:
    """The tenant's export schedules and the state of each."""
    with visit.services.database.read() as session:
        rows = schedules.open_ones(session, visit.scope.tenant_id)
        return {"object": "list", "data": [schedule_json(row) for row in rows]}


@router.get("/exports/jobs")
def export_jobs(visit: Exports, limit: Annotated[int, Query(ge=1, le=500)] = 100) -> dict[str, Any]:
    """Export jobs of the tenant's schedules, newest first, with rows, bytes and SHA-256."""
    with visit.services.database.read() as session:
        rows = session.scalars(
            select(ExportJob)
            .where(ExportJob.tenant_id == visit.scope.tenant_id)
            .order_by(ExportJob.id.desc())
            .limit(limit)
        )
        return {"object": "list", "data": [job_json(row) for row in rows]}


def _rows(visit: Visit, what: str, form: Format, period: Period) -> Iterator[bytes]:
    with visit.services.database.read() as session:
        yield from chunks_of(session, what, form, visit.scope, period)


def _buckets(visit: Visit, query: BucketQuery, kinds: tuple[str, ...]) -> Any:
    from dataclasses import replace

    with visit.services.database.read() as session:
        return usage_buckets(session, visit.scope, replace(query, kinds=kinds))


def _period(now: datetime, start: str | None, end: str | None) -> Period:
    """By default the last 31 days."""
    until = _moment("end", end) or now
    since = _moment("start", start) or until - timedelta(days=31)
    if since >= until:
        raise BadRequest(
            "start is not before end.", next_step="Give a start before the end.", param="start"
        )
    return Period(since, until)


def _moment(name: str, text: str | None) -> datetime | None:
    return moment_of(text, name) if text is not None else None


def _parameters(request: Request) -> dict[str, list[str]]:
    given: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        given.setdefault(name, []).append(value)
    return given


def _json(page: dict[str, Any]) -> Response:
    # Amounts are exact decimals; OpenAI's schema requires `number`.
    return Response(orjson.dumps(page, default=float), media_type="application/json")
