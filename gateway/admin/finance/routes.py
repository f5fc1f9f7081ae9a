"""/v1/organization/usage and /costs in OpenAI's format, and /v1/exports as streamed files."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response, StreamingResponse
from sqlalchemy import select

from billing.exports import schedules
from billing.exports.encoding import (
    NAMES,
    Export,
    chunks_of,
    column_names,
    export_of,
    format_of,
)
from billing.exports.focus.metadata import schema_json
from billing.exports.focus.tables import DATASETS, DEFAULT_VERSION, VERSIONS, choose
from billing.exports.formats import Format
from billing.exports.subjects import Period
from billing.exports.tables import ExportJob
from billing.exports.views import job_json, schedule_json
from billing.periods import zone_of
from billing.pricing import engine_prices
from billing.pricing.exchange_rates import Converter
from billing.reports import margin, month_end
from billing.usage.label_buckets import buckets_by_label
from billing.usage.usage_buckets import BucketPage, BucketQuery
from core.errors import BadRequest
from core.events import UsageKind
from gateway.admin.access import AdminContext, OperatorContext, RequireOperator, RequirePermission
from gateway.admin.billing.routes import record
from gateway.admin.billing.schemas import MonthSignature, NewEnginePrice
from gateway.admin.finance import schemas as shapes
from gateway.admin.ledger.routes import Reporting
from gateway.edge.decoding import parse_datetime
from gateway.serving.api.bodies import reads_query

router = APIRouter(prefix="/v1", tags=["finance"])
UsageReadAccess = Annotated[AdminContext, Depends(RequirePermission("usage", "read"))]
CostReadAccess = Annotated[AdminContext, Depends(RequirePermission("costs", "read"))]
ExportReadAccess = Annotated[AdminContext, Depends(RequirePermission("exports", "read"))]


@router.get("/organization/usage/completions")
@reads_query(*shapes.PARAMETERS)
def completions_usage(request: Request, ctx: UsageReadAccess) -> Response:
    """Tokens and requests of generations in buckets of 1m, 1h or 1d."""
    return as_json(usage_of(ctx, parameters_of(request)))


@router.get("/organization/costs")
@reads_query(*shapes.PARAMETERS)
def costs(request: Request, ctx: CostReadAccess) -> Response:
    """Charges per day, before tax and credits."""
    return as_json(costs_of(ctx, parameters_of(request)))


_FocusVersion = Annotated[
    str,
    Query(description=f"Of FOCUS: {', '.join(VERSIONS)}; without it {DEFAULT_VERSION}."),
]
_Dataset = Annotated[
    str, Query(description=f"Of FOCUS: {', '.join(DATASETS)}; without it the first.")
]


@dataclass(frozen=True, slots=True)
class FocusChoice:
    version: str = ""
    dataset: str = ""
    columns: tuple[str, ...] = ()


def focus_choice(
    focus_version: _FocusVersion = "",
    dataset: _Dataset = "",
    columns: Annotated[
        str, Query(description="Of FOCUS: only these columns, separated by commas.")
    ] = "",
) -> FocusChoice:
    return FocusChoice(focus_version, dataset, column_names(columns))


@dataclass(frozen=True, slots=True)
class Days:
    start: str | None
    end: str | None
    time_zone: str


def days_asked(
    start: Annotated[str | None, Query(description="First day or time, inclusive.")] = None,
    end: Annotated[str | None, Query(description="Last day or time, exclusive.")] = None,
    time_zone: Annotated[str, Query(description="Of both, an IANA name; UTC without it.")] = "UTC",
) -> Days:
    return Days(start, end, time_zone)


@router.get("/exports")
def export(
    ctx: ExportReadAccess,
    focus: Annotated[FocusChoice, Depends(focus_choice)],
    days: Annotated[Days, Depends(days_asked)],
    what: Annotated[str, Query(description=f"One of {', '.join(NAMES)}.")] = "usage",
    format: Annotated[str, Query(description="csv, jsonl or parquet.")] = "csv",
) -> StreamingResponse:
    """Download the tenant's usage, charges, invoices or ledger, or a FOCUS dataset."""
    export = export_of(what, focus.version, focus.dataset, focus.columns)
    form = format_of(format)
    period = _period(ctx.clock.now(), days)
    name = f"tollhouse-{export.stem}-{period.start:%Y%m%d}-{period.end:%Y%m%d}.{form.value}"
    return StreamingResponse(
        _rows(ctx, export, form, period),
        media_type=form.media_type,
        headers={"content-disposition": f'attachment; filename="{name}"'},
    )


@router.get("/exports/focus/schema")
def focus_schema(
    ctx: ExportReadAccess, focus_version: _FocusVersion = "", dataset: _Dataset = ""
) -> dict[str, Any]:
    """The columns of a FOCUS dataset: their types, whether they may be null, and their values."""
    return schema_json(choose(focus_version, dataset))


@router.get("/exports/schedules")
def export_schedules(ctx: ExportReadAccess) -> dict[str, Any]:
    """The tenant's export schedules and the state of each."""
    with ctx.database.read() as session:
        rows = schedules.open_schedules(session, ctx.scope.tenant_id)
        return {"object": "list", "data": [schedule_json(row) for row in rows]}


@router.get("/exports/jobs")
def export_jobs(
    ctx: ExportReadAccess, limit: Annotated[int, Query(ge=1, le=500)] = 100
) -> dict[str, Any]:
    """Export jobs of the tenant's schedules, newest first, with rows, bytes and SHA-256."""
    with ctx.database.read() as session:
        rows = session.scalars(
            select(ExportJob)
            .where(ExportJob.tenant_id == ctx.scope.tenant_id)
            .order_by(ExportJob.id.desc())
            .limit(limit)
        )
        return {"object": "list", "data": [job_json(row) for row in rows]}


def usage_of(ctx: AdminContext, parameters: dict[str, list[str]]) -> dict[str, Any]:
    query, groups = shapes.usage_query(parameters, ctx.clock.now())
    kinds = (UsageKind.GENERATION.value, UsageKind.CACHE_HIT.value)
    return shapes.usage_page(buckets_of(ctx, query, kinds, shapes.labels_asked(parameters)), groups)


def costs_of(ctx: AdminContext, parameters: dict[str, list[str]]) -> dict[str, Any]:
    query, groups = shapes.costs_query(parameters, ctx.clock.now())
    return shapes.costs_page(buckets_of(ctx, query, (), shapes.labels_asked(parameters)), groups)


def _rows(ctx: AdminContext, export: Export, form: Format, period: Period) -> Iterator[bytes]:
    with ctx.database.report(fresh=True) as session:
        yield from chunks_of(session, export, form, ctx.scope, period)


def buckets_of(
    ctx: AdminContext, query: BucketQuery, kinds: tuple[str, ...], labels: tuple[str, ...]
) -> BucketPage:
    with ctx.database.report() as session:
        return buckets_by_label(session, ctx.scope, replace(query, kinds=kinds), labels)


def _period(now: datetime, days: Days) -> Period:
    """By default the last 31 days."""
    zone = shapes.checked_zone(days.time_zone)
    until = _parse_time("end", days.end, zone) or now
    since = _parse_time("start", days.start, zone) or until - timedelta(days=31)
    if since >= until:
        raise BadRequest(
            "start is not before end.", next_step="Give a start before the end.", param="start"
        )
    return Period(since, until)


def _parse_time(name: str, text: str | None, zone: str) -> datetime | None:
    return parse_datetime(text, name, zone_of(zone)) if text is not None else None


def parameters_of(request: Request) -> dict[str, list[str]]:
    given: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        given.setdefault(name, []).append(value)
    return given


def as_json(page: dict[str, Any]) -> Response:
    # Amounts are exact decimals; OpenAI's schema requires `number`.
    return Response(orjson.dumps(page, default=float), media_type="application/json")


margin_router = APIRouter(prefix="/admin/v1", tags=["billing-admin"])
MarginAccess = Annotated[OperatorContext, Depends(RequireOperator("operations", "read"))]
EnginePriceAccess = Annotated[OperatorContext, Depends(RequireOperator("prices", "write"))]
_DAYS = 30


@margin_router.get("/engine-prices")
def list_engine_prices(ctx: MarginAccess) -> dict[str, Any]:
    """By pool, newest first."""
    with ctx.database.read() as session:
        rows = [engine_prices.describe(each) for each in engine_prices.listed(session)]
    return {"object": "list", "data": rows}


@margin_router.post("/engine-prices", status_code=201)
def save_engine_price(body: NewEnginePrice, ctx: EnginePriceAccess) -> dict[str, Any]:
    """What an hour of an engine costs, from a day on. One of the same pool and day is replaced."""
    start = _midnight(body.effective_from) if body.effective_from else None
    draft = engine_prices.EnginePriceDraft(
        body.pool, body.per_hour, body.currency, start, body.note, ctx.actor.id
    )
    with ctx.database.transaction() as session:
        shown = engine_prices.describe(engine_prices.save(session, ctx.clock, draft))
        record(session, ctx, "", "engine_price.set", draft.pool, shown)
    return shown


@margin_router.get("/margin")
def get_margin(
    ctx: MarginAccess,
    first: Annotated[date | None, Query(alias="from", description="default: 30 days")] = None,
    last: Annotated[date | None, Query(alias="to", description="inclusive, UTC")] = None,
    by: Annotated[list[str] | None, Query(description="model, tenant, adapter")] = None,
    currency: str = "USD",
    reporting: Reporting = "",
) -> dict[str, Any]:
    """Revenue, engine seconds, their cost and the margin, of the tenants billed in `currency`; with
    `reporting` of all, in that currency at the rates of the days."""
    last = last or ctx.clock.now().date()
    first = first or last - timedelta(_DAYS - 1)
    if first > last:
        raise BadRequest(
            f"The range starts on {first}, after its end on {last}.",
            next_step="Swap the dates.",
            param="from",
        )
    start, end = _midnight(first), _midnight(last)
    with ctx.database.read() as session:
        converter = Converter.load(session, reporting, first, last) if reporting else None
        report = margin.read(
            session,
            start,
            end + timedelta(1),
            tuple(by or ("model",)),
            currency.upper(),
            converter=converter,
        )
    return margin.describe(report)


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


month_router = APIRouter(prefix="/admin/v1", tags=["billing-admin"])
MonthAccess = Annotated[OperatorContext, Depends(RequireOperator("money", "read"))]
SigningAccess = Annotated[OperatorContext, Depends(RequireOperator("money", "write"))]
Month = Annotated[str, Path(pattern=r"^\d{4}-\d{2}$", description="such as 2026-01, in UTC")]


@month_router.get("/months/{month}")
def get_month(month: Month, ctx: MonthAccess) -> dict[str, Any]:
    """The checklist as of now, and who signed. `changed`: entries reached the month after it."""
    now = ctx.clock.now()
    with ctx.database.read() as session:
        checks = month_end.checklist(session, now, month_end.known_month(month, now))
        signed = month_end.signatures(session, month)
        return {
            "month": month,
            "checklist": [asdict(each) for each in checks],
            "signatures": [month_end.describe(session, each) for each in signed],
        }


@month_router.post("/months/{month}/signatures", status_code=201)
def sign_month(month: Month, body: MonthSignature, ctx: SigningAccess) -> dict[str, Any]:
    """Sign a month off; 409 while a check is bad."""
    with ctx.database.transaction() as session:
        signed = month_end.sign(session, ctx.clock, month, ctx.actor.id, body.note)
        return month_end.describe(session, signed)
