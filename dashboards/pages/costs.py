"""Costs: spend by day and by price component, the forecast to the month's end, and what caching saved."""

from datetime import datetime, timedelta

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dashboards import charts, figures
from dashboards.filters import choice, date_range
from dashboards.pages.common import house_of, viewer_of, wants_csv
from dashboards.render import page, svg
from dashboards.scales import Number, short
from dashboards.tables import Column, Table

COMPONENTS = {
    "input_amount": "Input",
    "cached_amount": "Cached input",
    "output_amount": "Output",
    "request_amount": "Requests",
    "adapter_amount": "Adapters",
    "moderation_amount": "Moderation",
    "gpu_amount": "GPU seconds",
    "waived_amount": "Waived",
}


def costs_table(found: figures.Figures, currency: str) -> Table:
    used = [key for key in COMPONENTS if found.total(key)] or ["input_amount", "output_amount"]
    columns = [
        Column("group", figures.GROUPS[found.group_by]),
        *(Column(key, COMPONENTS[key], "money") for key in used),
        Column("amount", "Total", "money", "The sum of the components, before tax and credits."),
    ]
    rows = [
        {"group": found.name(group), "amount": sums["amount"], **{key: sums[key] for key in used}}
        for group, sums in sorted(found.counts.items(), key=lambda pair: -pair[1]["amount"])
    ]
    return Table(f"Spend by {figures.GROUPS[found.group_by].lower()}", columns, rows, currency)


def forecast(spent: int, month_start: datetime, now: datetime) -> int:
    """This month's spend at this month's mean rate, to the month's end. Whole picounits."""
    end = (month_start + timedelta(32)).replace(day=1)
    elapsed = max(1, int((now - month_start).total_seconds()))
    return spent * int((end - month_start).total_seconds()) // elapsed


def costs(request: Request) -> Response:
    viewer, house = viewer_of(request, "costs"), house_of(request)
    now = house.clock.now()
    span = date_range(request, now, now.day)
    group_by = choice(request, "by", tuple(figures.GROUPS), "model")
    with house.database.read() as session:
        found = figures.read(session, viewer.scope, span, now, group_by)
    currency = viewer.currency
    table = costs_table(found, currency)
    if wants_csv(request):
        return table.csv(f"costs-{span.first}-{span.last}")
    parts = [
        charts.Series(title, found.per_step(key))
        for key, title in COMPONENTS.items()
        if found.total(key)
    ]
    running, line = 0, []
    for amount in found.per_step("amount"):
        running += amount
        line.append(running)
    month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    covers_month = span.start == month and span.last == now.date()
    return page(
        request,
        "costs.html",
        span=span,
        by=group_by,
        groups=figures.GROUPS,
        table=table,
        figures=found,
        currency=currency,
        forecast=forecast(found.total("amount"), month, now) if covers_month else None,
        daily=svg(charts.stacked_bars("Spend", found.labels, parts, label=_money)),
        cumulative=svg(
            charts.lines("Spend, cumulative", found.labels, [charts.Series("spend", line)], _money)
        ),
    )


def _money(units: Number) -> str:
    return short(float(units) / 1e12)


ROUTES = [Route("/costs", costs)]
