"""Overview: this month's totals, daily spend, and the most used models and keys."""

from datetime import timedelta

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.usage.day_range import Range
from billing.usage.usage_buckets import Width
from dashboards import charts, service_totals, usage_totals
from dashboards.formats import exact, money, money_label, share
from dashboards.page_data import Chart, PageData, Tile, show
from dashboards.pages.common import deps_of, root_of, viewer_of
from dashboards.pages.costs import (
    amount_axis,
    costs_table,
    forecast,
    markup_of,
    with_markup,
)
from dashboards.pages.usage import usage_table
from dashboards.render import svg
from dashboards.scales import count_of, grouped, short


def overview(request: Request) -> Response:
    viewer, deps = viewer_of(request, "usage"), deps_of(request)
    now, root = deps.clock.now(), root_of(request)
    span = Range.month_of(now, viewer.timezone)
    hour = now.replace(minute=0, second=0, microsecond=0)
    with deps.database.report() as session:
        models = usage_totals.read(session, viewer.scope, span, now, "model")
        keys = usage_totals.read(session, viewer.scope, span, now, "key_id")
        corrected = usage_totals.corrections(session, viewer.scope, span)
        markup_ppm = markup_of(session, viewer.scope.tenant_id)
        last_day, _ = service_totals.read(
            session, viewer.scope, hour - timedelta(hours=23), hour + timedelta(hours=1), Width.HOUR
        )
    sees_costs = deps.auth.may(viewer, "costs", "read")
    column = "amount" if sees_costs else "output_tokens"
    tables = [
        costs_table(each, viewer.currency, markup_ppm) if sees_costs else usage_table(each)
        for each in (models, keys)
    ]
    drawn = charts.stacked_bars(
        "This month by model",
        models.labels,
        models.series(column),
        amount_axis if sees_costs else short,
        money_label(viewer.currency) if sees_costs else count_of("token"),
    )
    cached, input_tokens = models.total("cached_tokens"), models.total("input_tokens")
    failed, answered = last_day.sums["failed"], last_day.sums["answers"]
    first = last_day.first_token_ms(0.95)
    spent = models.total("amount")
    forecast_amount = money(forecast(spent, corrected, span, now), viewer.currency)
    billed = money(with_markup(spent, markup_ppm), viewer.currency)
    spend = Tile(
        "Spend this month",
        money(spent, viewer.currency),
        f"exactly {exact(spent)}; forecast {forecast_amount}"
        + (f"; with mark-up {billed}" if markup_ppm else ""),
        "The sum of the charges since the first day of the month.",
        href=f"{root}/costs",
    )
    tiles = [
        *([spend] if sees_costs else []),
        Tile("Requests", grouped(models.total("requests")), href=f"{root}/usage"),
        Tile("Tokens in", grouped(input_tokens), f"{share(cached, input_tokens)} cached"),
        Tile("Tokens out", grouped(models.total("output_tokens"))),
        Tile(
            "Server errors, 24 hours",
            grouped(failed),
            share(failed, answered),
            "Requests in the last 24 hours with a status of 500 or above.",
            state="bad" if failed else "",
            href=f"{root}/requests?q=status:5xx+since:2d",
        ),
        Tile(
            "First token, 24 hours",
            "–" if first is None else f"{first:.0f} ms",
            "p95",
            "95 % of responses in the last 24 hours started sooner.",
        ),
    ]
    page_data = PageData(
        "Overview",
        "This month to date.",
        tiles=tiles,
        charts=[
            Chart(f"By model, {viewer.currency if sees_costs else 'output tokens'}", svg(drawn))
        ]
        if models.counts
        else [],
        tables=tables if models.counts else tables[:1],
        link=None if models.counts else ("/keys", "Create a key"),
    )
    return show(request, page_data)


ROUTES = [Route("/", overview)]
