"""Exchange rates of the day, and what reports in one currency show of them."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.pricing import exchange_rates
from billing.pricing.exchange_rates import Converter, RateDraft
from core.tenants import audit
from dashboards.page_data import Form, Input, PageData, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    operator_of,
    redirect_with_notice,
    wants_csv,
)
from dashboards.tables import Column, Table

PATH = "/operator/exchange-rates"
_PAIR = [
    Column("day", "Day"),
    Column("base", "Base"),
    Column("quote", "Quote"),
    Column("rate", "Rate", "figure", "What one unit of the base is worth in the quote."),
]
_COLUMNS = [*_PAIR, Column("recorded_by", "Recorded by")]


def page_of(request: Request) -> Response:
    viewer = operator_of(request, "operations")
    deps = deps_of(request)
    with deps.database.read() as session:
        rows = [exchange_rates.describe(each) for each in exchange_rates.listed(session)]
    empty = "No rates yet. Without them, currencies are not converted."
    step = ("#rate-of-a-day", "Record a rate")
    table = Table(
        "Exchange rates, newest first", _COLUMNS, rows, totals=False, empty=empty, next_step=step
    )
    if wants_csv(request):
        return table.csv("exchange-rates")
    page_data = PageData(
        "Exchange rates",
        "For reports in one currency alone: prices, invoices and the ledger never use them.",
        tables=[table],
        forms=_forms(f"{deps.clock.now():%Y-%m-%d}")
        if deps.auth.may(viewer, "money", "write")
        else [],
    )
    return show(request, page_data)


def _forms(today: str) -> list[Form]:
    replace = Input(
        "replace", "Replace recorded rates", "select", "no", [("no", "no"), ("yes", "yes")]
    )
    one = [
        Input("day", "Day", "date", today),
        Input("base", "Base", value="EUR"),
        Input("quote", "Quote", value="USD"),
        Input("rate", "Rate", hint="what one unit of the base is worth"),
        replace,
    ]
    many = [Input("csv", "Rates", "area", hint="day,base,quote,rate and a line for each"), replace]
    return [
        Form(PATH, "Save", {"act": "save"}, one, title="Rate of a day"),
        Form(PATH, "Import", {"act": "import"}, many, title="Rates from CSV"),
    ]


def _save(request: Request, form_fields: Fields) -> Response:
    draft = RateDraft(*(form_fields.get(name, "") for name in exchange_rates.HEADER))
    return _record(request, [draft], form_fields)


def _import(request: Request, form_fields: Fields) -> Response:
    return _record(request, exchange_rates.parse_csv(form_fields.get("csv", "")), form_fields)


def _record(request: Request, drafts: list[RateDraft], form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "money", "write"), deps_of(request)
    replace = form_fields.get("replace") == "yes"
    with deps.database.transaction() as session:
        actor = viewer.scope.actor
        for row in exchange_rates.record(session, deps.clock, drafts, actor, replace=replace):
            after = exchange_rates.describe(row)
            target = f"{row.base}/{row.quote} {row.day}"
            audit.record_operator(
                session, deps.clock, actor, "exchange_rate.set", target, before=None, after=after
            )
    return redirect_with_notice(request, PATH, "rates-saved")


def reporting_input(value: str) -> Input:
    hint = "one currency for all, at the rates of the days"
    return Input("reporting", "Reporting currency", value=value, required=False, hint=hint)


def rates_tables(converter: Converter | None) -> list[Table]:
    """The rates that a report used."""
    if converter is None:
        return []
    return [Table("Rates used", _PAIR, converter.rates_used(), totals=False, empty="None.")]


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(PATH, form_handler(page_of, save=_save, **{"import": _import}), methods=["POST"]),
]
