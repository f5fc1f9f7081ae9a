"""/admin/v1: what engines cost, and the margin of models, tenants and adapters."""

from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from billing.pricing import engine_prices
from billing.pricing.exchange_rates import Converter
from billing.reports import margin
from core.errors import BadRequest
from gateway.admin.access import OperatorContext, RequireOperator
from gateway.admin.billing.records import record
from gateway.admin.billing.schemas import NewEnginePrice
from gateway.admin.ledger.routes import Reporting

router = APIRouter(prefix="/admin/v1", tags=["billing-admin"])
ReadAccess = Annotated[OperatorContext, Depends(RequireOperator("operations", "read"))]
WriteAccess = Annotated[OperatorContext, Depends(RequireOperator("prices", "write"))]
_DAYS = 30


@router.get("/engine-prices")
def list_engine_prices(ctx: ReadAccess) -> dict[str, Any]:
    """By pool, newest first."""
    with ctx.database.read() as session:
        rows = [engine_prices.describe(each) for each in engine_prices.listed(session)]
    return {"object": "list", "data": rows}


@router.post("/engine-prices", status_code=201)
def save_engine_price(body: NewEnginePrice, ctx: WriteAccess) -> dict[str, Any]:
    """What an hour of an engine costs, from a day on. One of the same pool and day is replaced."""
    start = _midnight(body.effective_from) if body.effective_from else None
    draft = engine_prices.EnginePriceDraft(
        body.pool, body.per_hour, body.currency, start, body.note, ctx.actor.id
    )
    with ctx.database.transaction() as session:
        shown = engine_prices.describe(engine_prices.save(session, ctx.clock, draft))
        record(session, ctx, "", "engine_price.set", draft.pool, shown)
    return shown


@router.get("/margin")
def get_margin(
    ctx: ReadAccess,
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
