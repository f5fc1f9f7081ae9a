"""/v1/organization/usage and /costs in OpenAI's shapes, and /v1/exports, streamed."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response, StreamingResponse

from billing.buckets import BucketQuery, usage_buckets
from billing.exports.focus import COLUMNS as FOCUS_COLUMNS
from billing.exports.focus import focus_rows
from billing.exports.formats import Format, encode
from billing.exports.subjects import SUBJECTS, Period
from core.errors import BadRequest
from core.events import UsageKind
from gateway.api.admin.access import Allowed, Visit
from gateway.schemas import finance as shapes

router = APIRouter(prefix="/v1", tags=["finance"])
ReadsUsage = Annotated[Visit, Depends(Allowed("usage", "read"))]
ReadsCosts = Annotated[Visit, Depends(Allowed("costs", "read"))]
Exports = Annotated[Visit, Depends(Allowed("exports", "read"))]
NAMES = (*SUBJECTS, "focus")


@router.get("/organization/usage/completions")
def completions_usage(request: Request, visit: ReadsUsage) -> Response:
    """Tokens and requests of generations, in buckets of 1m, 1h or 1d."""
    parameters = _parameters(request)
    query, groups = shapes.usage_query(parameters, visit.services.clock.now())
    kinds = (UsageKind.GENERATION.value,)
    return _json(shapes.usage_page(_buckets(visit, query, kinds), groups))


@router.get("/organization/costs")
def costs(request: Request, visit: ReadsCosts) -> Response:
    """Charges by day, before tax and credits."""
    parameters = _parameters(request)
    query, groups = shapes.costs_query(parameters, visit.services.clock.now())
    return _json(shapes.costs_page(_buckets(visit, query, ()), groups))


@router.get("/exports")
def export(
    visit: Exports,
    what: Annotated[str, Query(description=f"One of {', '.join(NAMES)}.")] = "usage",
    format: Annotated[str, Query(description="csv, jsonl or parquet.")] = "csv",
    start: Annotated[str | None, Query(description="First day, or moment, UTC.")] = None,
    end: Annotated[str | None, Query(description="First day, or moment, not included.")] = None,
) -> StreamingResponse:
    """A file of the tenant's usage, charges, invoices or ledger, or a FOCUS 1.2 file."""
    if what not in NAMES:
        raise BadRequest(f"No export {what!r}: one of {', '.join(NAMES)}.", param="what")
    try:
        form = Format(format)
    except ValueError:
        raise BadRequest(
            f"No format {format!r}: one of {', '.join(Format)}.", param="format"
        ) from None
    period = _period(visit.services.clock.now(), start, end)
    name = f"tollhouse-{what}-{period.start:%Y%m%d}-{period.end:%Y%m%d}.{form.value}"
    return StreamingResponse(
        _rows(visit, what, form, period),
        media_type=form.media_type,
        headers={"content-disposition": f'attachment; filename="{name}"'},
    )


def _rows(visit: Visit, what: str, form: Format, period: Period) -> Iterator[bytes]:
    with visit.services.database.read() as session:
        if what == "focus":
            yield from encode(focus_rows(session, visit.scope, period), FOCUS_COLUMNS, form)
            return
        subject = SUBJECTS[what]
        yield from encode(subject.rows(session, visit.scope, period), subject.columns, form)


def _buckets(visit: Visit, query: BucketQuery, kinds: tuple[str, ...]) -> Any:
    from dataclasses import replace

    with visit.services.database.read() as session:
        return usage_buckets(session, visit.scope, replace(query, kinds=kinds))


def _period(now: datetime, start: str | None, end: str | None) -> Period:
    """The last 31 days by default."""
    until = _moment("end", end) or now
    since = _moment("start", start) or until - timedelta(days=31)
    if since >= until:
        raise BadRequest("start is not before end.", param="start")
    return Period(since, until)


def _moment(name: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(
            f"{name} is {text[:40]!r}, not a date like 2026-11-21.", param=name
        ) from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _parameters(request: Request) -> dict[str, list[str]]:
    given: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        given.setdefault(name, []).append(value)
    return given


def _json(page: dict[str, Any]) -> Response:
    # Amounts are exact decimals; OpenAI's document says `number`.
    return Response(orjson.dumps(page, default=float), media_type="application/json")
