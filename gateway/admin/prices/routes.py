"""/admin/v1: exchange rates of the day, and revenue in one currency."""

from datetime import date
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from billing.pricing import exchange_rates
from billing.pricing.exchange_rates import Converter, RateDraft
from billing.reports import revenue
from billing.usage.day_range import Range
from core.errors import BadRequest
from gateway.admin.access import OperatorContext, RequireOperator
from gateway.admin.billing.routes import record
from gateway.admin.billing.schemas import ExchangeRateFile, NewExchangeRate
from gateway.admin.ledger.routes import Reporting

router = APIRouter(prefix="/admin/v1", tags=["billing-admin"])
ReadAccess = Annotated[OperatorContext, Depends(RequireOperator("operations", "read"))]
WriteAccess = Annotated[OperatorContext, Depends(RequireOperator("money", "write"))]


@router.get("/exchange-rates")
def list_exchange_rates(ctx: ReadAccess) -> dict[str, Any]:
    """The newest first."""
    with ctx.database.read() as session:
        rows = [exchange_rates.describe(each) for each in exchange_rates.listed(session)]
    return {"object": "list", "data": rows}


@router.post("/exchange-rates", status_code=201)
def record_exchange_rate(body: NewExchangeRate, ctx: WriteAccess) -> dict[str, Any]:
    """The rate of a day; 409 if the day has another one, unless `replace`."""
    draft = RateDraft(body.day, body.base, body.quote, body.rate)
    (shown,) = _record(ctx, [draft], replace=body.replace)
    return shown


@router.post("/exchange-rates/import", status_code=201)
def import_exchange_rates(body: ExchangeRateFile, ctx: WriteAccess) -> dict[str, Any]:
    """All rates of a CSV file, or none."""
    rows = _record(ctx, exchange_rates.parse_csv(body.csv), replace=body.replace)
    return {"object": "list", "data": rows}


@router.get("/revenue")
def get_revenue(
    ctx: ReadAccess,
    first: Annotated[date | None, Query(alias="from", description="default: this month")] = None,
    last: Annotated[date | None, Query(alias="to", description="inclusive, UTC")] = None,
    reporting: Reporting = "",
) -> dict[str, Any]:
    """Used, billed, collected and open amounts by currency, or in one. `used`, `given` and `deferred`
    are picounits, the others minor units."""
    last = last or ctx.clock.now().date()
    first = first or last.replace(day=1)
    if first > last:
        raise BadRequest(
            f"The range starts on {first}, after its end on {last}.",
            next_step="Swap the dates.",
            param="from",
        )
    span, rates = Range(first, last), list[dict[str, Any]]()
    with ctx.database.read() as session:
        if reporting:
            converter = Converter.load(session, reporting, first, last)
            found = [revenue.read_in(session, span, converter)]
            rates = converter.rates_used()
        else:
            found = revenue.read(session, span)
    rows = [{name: getattr(each, name) for name in each.__slots__} for each in found]
    return {"object": "list", "data": rows, "rates": rates}


def _record(
    ctx: OperatorContext, drafts: list[RateDraft], *, replace: bool
) -> list[dict[str, Any]]:
    with ctx.database.transaction() as session:
        rows = exchange_rates.record(session, ctx.clock, drafts, ctx.actor.id, replace=replace)
        shown = [exchange_rates.describe(each) for each in rows]
        for each in shown:
            target = f"{each['base']}/{each['quote']} {each['day']}"
            record(session, ctx, "", "exchange_rate.set", target, each)
    return shown
