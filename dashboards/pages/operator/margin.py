"""Margin: what usage earned, and what the engines' time for it cost, by model, tenant and adapter."""

from decimal import Decimal
from typing import Any

from sqlalchemy import func, select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.pricing import engine_prices
from billing.pricing.exchange_rates import Converter
from billing.pricing.tables import EnginePrice
from billing.reports import margin
from billing.reports.margin import MarginReport, MarginRow
from billing.usage.day_range import Range
from core.money import decimal_of, units_of
from core.tenants import audit
from core.tenants.models import Tenant
from dashboards.filters import choice, date_range, decimal_field, start_of_day
from dashboards.formats import money
from dashboards.page_data import Form, Input, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    operator_of,
    redirect_with_notice,
    sorted_by,
    wants_csv,
)
from dashboards.pages.operator.exchange_rates import rates_tables, reporting_input
from dashboards.scales import grouped
from dashboards.tables import Column, Table

PATH = "/operator/margin"
GROUPS = {
    "model": ("model",),
    "tenant": ("tenant",),
    "adapter": ("model", "adapter"),
    "tenant-model": ("model", "tenant"),
    "tenant-adapter": ("model", "tenant", "adapter"),
}
_NAMES = {
    "model": "Model",
    "tenant": "Tenant",
    "adapter": "Model and adapter",
    "tenant-model": "Tenant and model",
    "tenant-adapter": "Tenant, model and adapter",
}
_TITLES = {"model": "Model", "tenant": "Tenant", "adapter": "Adapter"}
_SUMS = [
    Column("requests", "Requests", "whole"),
    Column("tokens", "Tokens", "whole", "Input (including cached) and output tokens."),
    Column("amount", "Revenue", "money", "Charges in this period, before tax and credits."),
    Column("per_million", "Per million tokens", "money", "Revenue divided by tokens."),
    Column(
        "seconds",
        "Engine seconds",
        "figure",
        "The share of the engines' steps that computed these requests.",
    ),
    Column("cost", "Engine cost", "money", "Engine seconds at the price of each engine."),
    Column("margin", "Margin", "money", "Revenue less engine cost."),
    Column("share", "Margin, %", "figure", "Margin as a share of revenue."),
]
_PRICES = [
    Column("pool", "Engines", "code", "A pattern of engines' names; the longest that matches."),
    Column("per_hour", "Per hour", "figure"),
    Column("currency", "Currency"),
    Column("since", "From", "moment"),
    Column("note", "Note"),
    Column("by", "Saved by"),
]


_MOST_PERCENT = 999  # a loss beyond it says only that there is hardly any revenue yet


def page_of(request: Request) -> Response:
    viewer = operator_of(request, "operations")
    deps = deps_of(request)
    now = deps.clock.now()
    span = date_range(request, now, 30)
    gpus = _number(request, "gpus", str(max(1, len(deps.backend.engines()))))
    rate = _number(request, "rate", "2.00")
    currency = request.query_params.get("currency", "USD")[:3].upper()
    by = choice(request, "by", tuple(GROUPS), "model")
    reporting = request.query_params.get("reporting", "").strip()
    with deps.database.report() as session:
        converter = None
        if reporting:
            converter = Converter.load(session, reporting, span.first, span.last)
            currency = converter.currency
        report = margin.read(
            session, span.start, span.end, GROUPS[by], currency, converter=converter
        )
        prices = engine_prices.listed(session)
        installed_at = session.scalar(select(func.min(Tenant.created_at))) or now
    table = _table(request, report)
    if wants_csv(request):
        return table.csv(f"margin-{span.first}-{span.last}")
    start = max(span.start, installed_at)
    seconds = max(1, int((min(span.end, now) - start).total_seconds()))
    may_write = deps.auth.may(viewer, "prices", "write")
    page_data = PageData(
        "Margin",
        f"{gpus} {'GPU' if gpus == 1 else 'GPUs'} for {_hours(seconds)} hours at {rate} "
        f"{currency} per GPU-hour.",
        tiles=[*_time_tiles(report), *_capacity_tiles(report, seconds, gpus, rate)],
        tables=[table],
        forms=[
            _assumptions_form(span, gpus, rate, currency, by, reporting),
            *([_price_form()] if may_write else []),
        ],
        after=[*rates_tables(converter), _price_table(prices)],
        remarks=_remarks(report),
    )
    return show(request, page_data)


def _table(request: Request, report: MarginReport) -> Table:
    columns = [*(Column(each, _TITLES[each]) for each in report.by), *_SUMS]
    rows: list[dict[str, Any]] = [
        {
            **{name: value or "none" for name, value in row.group.items()},
            "requests": row.requests,
            "tokens": row.tokens,
            "amount": row.revenue,
            "per_million": row.revenue * 10**6 // max(1, row.tokens),
            "seconds": Decimal(margin.seconds(row.busy_us)),
            "cost": row.cost,
            "margin": row.margin,
            "share": _share_of(row.margin, row.revenue) if row.revenue else None,
        }
        for row in report.rows
    ]
    [name] = [_NAMES[by] for by, group in GROUPS.items() if group == report.by]
    title = f"Margin by {name.lower()}"
    empty = f"No usage in {report.currency} in this period."
    table = Table(title, columns, rows, report.currency, totals=False, empty=empty)
    return sorted_by(request, table, "amount")


def _time_tiles(report: MarginReport) -> list[Tile]:
    total = report.total
    return [
        Tile("Revenue", money(total.revenue, report.currency)),
        Tile("Engine time", f"{total.busy_us / 3.6e9:,.2f} h", about="Busy with these requests."),
        Tile("Cost of engine time", money(total.cost, report.currency)),
        Tile(
            "Margin on engine time",
            _share_of(total.margin, total.revenue) if total.revenue else "–",
            about="Revenue minus the cost of engine time, as a share of revenue.",
        ),
    ]


def _capacity_tiles(report: MarginReport, seconds: int, gpus: Decimal, rate: Decimal) -> list[Tile]:
    total: MarginRow = report.total
    currency = report.currency
    cost = int(units_of(str(rate)) * gpus * seconds / 3600)
    hours = gpus * seconds / 3600
    per_hour = int(total.revenue / hours) if hours else 0
    per_million = cost * 10**6 // total.tokens if total.tokens else 0
    share = _share_of(total.revenue - cost, total.revenue) if total.revenue else "–"
    return [
        Tile("Cost of capacity", money(cost, currency), about="GPUs × hours × the rate."),
        Tile("Margin", share, about="Revenue minus the cost of capacity, as a share of revenue."),
        Tile("Revenue per GPU-hour", money(per_hour, currency), about="Revenue ÷ (GPUs × hours)."),
        Tile(
            "Cost per million tokens",
            money(per_million, currency) if total.tokens else "–",
            f"{grouped(total.tokens)} tokens",
            "Cost of capacity divided by all tokens, including cached ones.",
        ),
    ]


def _hours(seconds: int) -> str:
    """Of a day and more whole hours; fewer with two digits, so that minutes are not nothing."""
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 24 else f"{hours:.2g}"


def _remarks(report: MarginReport) -> list[str]:
    remarks = [
        "GPU-hours include idle time, from the first day of the period, or the installation if that "
        "is later, to now. Engine time does not: its cost is that of the requests alone."
    ]
    if report.unpriced_us:
        names = ", ".join(sorted(report.unpriced_us)[:5])
        remarks.append(
            f"Engines without a price in {report.currency} count as free: {names}. Set one below."
        )
    return remarks


def _share_of(profit: int, revenue: int) -> str:
    percent = 100 * profit / revenue
    return f"{percent:.1f} %" if percent > -_MOST_PERCENT else f"below −{_MOST_PERCENT} %"


def _assumptions_form(
    span: Range, gpus: Decimal, rate: Decimal, currency: str, by: str, reporting: str
) -> Form:
    inputs = [
        Input("from", "From", "date", str(span.first)),
        Input("to", "To (inclusive)", "date", str(span.last)),
        Input("by", "By", "select", by, options=list(_NAMES.items())),
        Input("gpus", "GPUs", "number", str(gpus), hint="default: the number of engines"),
        Input("rate", "Cost per GPU-hour", "number", str(rate)),
        Input("currency", "Currency", value=currency),
        reporting_input(reporting),
    ]
    return Form(PATH, "Calculate", inputs=inputs, title="Assumptions", method="get")


def _price_table(prices: list[EnginePrice]) -> Table:
    rows = [
        {
            "pool": each.pool,
            "per_hour": decimal_of(each.per_hour),
            "currency": each.currency,
            "since": each.starts_at,
            "note": each.note,
            "by": each.created_by,
        }
        for each in prices
    ]
    return Table(
        "Engine prices",
        _PRICES,
        rows,
        totals=False,
        empty="No engine has a price yet.",
        next_step=("#new-engine-price", "Set a price"),
    )


def _price_form() -> Form:
    inputs = [
        Input("pool", "Engines", value="*", hint="a pattern of names, such as h100-*"),
        Input("per_hour", "Cost of one engine per hour", "number"),
        Input("currency", "Currency", value="USD"),
        Input("from", "From", "date", required=False, hint="default: today"),
        Input("note", "Note", required=False),
    ]
    return Form(PATH, "Save", {"act": "price"}, inputs, title="New engine price", panel=True)


def _save_price(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "prices", "write"), deps_of(request)
    draft = engine_prices.EnginePriceDraft(
        form_fields.get("pool", ""),
        form_fields.get("per_hour", ""),
        form_fields.get("currency", "USD").upper(),
        start_of_day("from", form_fields.get("from", "")),
        form_fields.get("note", ""),
        viewer.scope.actor,
    )
    with deps.database.transaction() as session:
        shown = engine_prices.describe(engine_prices.save(session, deps.clock, draft))
        audit.record_operator(
            session,
            deps.clock,
            viewer.scope.actor,
            "engine_price.set",
            draft.pool,
            before=None,
            after=shown,
        )
    return redirect_with_notice(request, PATH, "engine-price-saved")


def _number(request: Request, name: str, usual: str) -> Decimal:
    next_step = "Use a number above 0 and at most 1,000,000."
    return decimal_field(request, name, usual, lambda value: 0 < value <= 1_000_000, next_step)


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(PATH, form_handler(page_of, price=_save_price), methods=["POST"]),
]
