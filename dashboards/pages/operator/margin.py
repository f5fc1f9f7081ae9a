"""Margin: revenue per GPU-hour and cost per million tokens, at the operator's own rate."""

from decimal import Decimal
from typing import Any

from sqlalchemy import func, select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.models import DailyTenantUsage
from core.money import units_of
from core.tenants.models import Tenant
from dashboards.filters import Range, date_range, decimal_field
from dashboards.formats import money
from dashboards.page_data import Form, Input, PageData, Tile, show
from dashboards.pages.common import deps_of, operator_of, wants_csv
from dashboards.scales import grouped
from dashboards.tables import Column, Table

PATH = "/operator/margin"
COLUMNS = [
    Column("model", "Model"),
    Column("requests", "Requests", "whole"),
    Column("tokens", "Tokens", "whole", "Input (including cached) and output tokens."),
    Column("amount", "Revenue", "money", "Charges in this period, before tax and credits."),
    Column("per_million", "Per million tokens", "money", "Revenue divided by tokens."),
    Column("share", "Share of revenue", "figure"),
]


_MOST_PERCENT = 999  # a loss beyond it says only that there is hardly any revenue yet


def page_of(request: Request) -> Response:
    operator_of(request, "operations")
    deps = deps_of(request)
    now = deps.clock.now()
    span = date_range(request, now, 30)
    gpus = _number(request, "gpus", str(max(1, len(deps.backend.engines()))))
    rate = _number(request, "rate", "2.00")
    currency = request.query_params.get("currency", "USD")[:3].upper()
    table_ = DailyTenantUsage
    with deps.database.read() as session:
        found = session.execute(
            select(
                table_.model,
                func.sum(table_.requests),
                func.sum(table_.input_tokens + table_.output_tokens),
                func.sum(table_.amount),
            )
            .where(table_.at >= span.start, table_.at < span.end, table_.currency == currency)
            .group_by(table_.model)
        ).all()
        installed_at = session.scalar(select(func.min(Tenant.created_at))) or now
    total = sum(int(row[3]) for row in found)
    rows: list[dict[str, Any]] = [
        {
            "model": model,
            "requests": int(requests),
            "tokens": int(tokens),
            "amount": int(amount),
            "per_million": int(amount) * 10**6 // max(1, int(tokens)),
            "share": f"{100 * int(amount) / total:.1f} %" if total else None,
        }
        for model, requests, tokens, amount in sorted(found, key=lambda row: -row[3])
    ]
    empty = f"No usage in {currency} in this period."
    table = Table("Revenue by model", COLUMNS, rows, currency, totals=False, empty=empty)
    if wants_csv(request):
        return table.csv(f"margin-{span.first}-{span.last}")
    start = max(span.start, installed_at)
    seconds = max(1, int((min(span.end, now) - start).total_seconds()))
    page_data = PageData(
        "Margin",
        f"{gpus} {'GPU' if gpus == 1 else 'GPUs'} for {seconds / 3600:,.0f} hours at {rate} "
        f"{currency} per GPU-hour.",
        tiles=_tiles(rows, total, seconds, gpus, rate, currency),
        tables=[table],
        forms=[_assumptions_form(span, gpus, rate, currency)],
        remarks=[
            "GPU-hours include idle time, from the first day of the period, or the installation if that "
            "is later, to now."
        ],
    )
    return show(request, page_data)


def _tiles(
    rows: list[dict[str, Any]],
    total: int,
    seconds: int,
    gpus: Decimal,
    rate: Decimal,
    currency: str,
) -> list[Tile]:
    tokens = sum(row["tokens"] for row in rows)
    cost = int(units_of(str(rate)) * gpus * seconds / 3600)
    hours = gpus * seconds / 3600
    per_hour = int(total / hours) if hours else 0
    per_million = cost * 10**6 // tokens if tokens else 0
    margin = _share_of(total - cost, total) if total else "–"
    return [
        Tile("Revenue", money(total, currency)),
        Tile("Cost of capacity", money(cost, currency), about="GPUs × hours × the rate."),
        Tile("Margin", margin, about="Revenue minus the cost of capacity, as a share of revenue."),
        Tile("Revenue per GPU-hour", money(per_hour, currency), about="Revenue ÷ (GPUs × hours)."),
        Tile(
            "Cost per million tokens",
            money(per_million, currency) if tokens else "–",
            f"{grouped(tokens)} tokens",
            "Cost of capacity divided by all tokens, including cached ones.",
        ),
    ]


def _share_of(profit: int, revenue: int) -> str:
    percent = 100 * profit / revenue
    return f"{percent:.1f} %" if percent > -_MOST_PERCENT else f"below −{_MOST_PERCENT} %"


def _assumptions_form(span: Range, gpus: Decimal, rate: Decimal, currency: str) -> Form:
    inputs = [
        Input("from", "From", "date", str(span.first)),
        Input("to", "To (inclusive)", "date", str(span.last)),
        Input("gpus", "GPUs", "number", str(gpus), hint="default: the number of engines"),
        Input("rate", "Cost per GPU-hour", "number", str(rate)),
        Input("currency", "Currency", value=currency),
    ]
    return Form(PATH, "Calculate", inputs=inputs, title="Assumptions", method="get")


def _number(request: Request, name: str, usual: str) -> Decimal:
    next_step = "Use a number above 0 and at most 1,000,000."
    return decimal_field(request, name, usual, lambda value: 0 < value <= 1_000_000, next_step)


ROUTES = [Route(PATH, page_of)]
