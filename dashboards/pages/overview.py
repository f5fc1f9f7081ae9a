"""Overview: this month in four figures, the spend a day, and what was used most."""

from datetime import timedelta

from sqlalchemy import func, select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.models import UsageEventRow
from dashboards import charts, figures
from dashboards.filters import Range
from dashboards.pages.common import house_of, viewer_of
from dashboards.pages.costs import costs_table
from dashboards.pages.usage import usage_table
from dashboards.render import page, svg
from dashboards.scales import short


def overview(request: Request) -> Response:
    viewer, house = viewer_of(request, "usage"), house_of(request)
    now = house.clock.now()
    span = Range(now.date().replace(day=1), now.date())
    with house.database.read() as session:
        models = figures.read(session, viewer.scope, span, now, "model")
        keys = figures.read(session, viewer.scope, span, now, "key_id")
        failed = session.scalar(
            select(func.count()).where(
                UsageEventRow.tenant_id == viewer.scope.tenant_id,
                UsageEventRow.occurred_at >= now - timedelta(days=1),
                UsageEventRow.status >= 500,
            )
        )
    seen_costs = house.doorman.may(viewer, "costs", "read")
    table = costs_table(models, viewer.currency) if seen_costs else usage_table(models)
    column = "amount" if seen_costs else "output_tokens"
    label = (lambda units: short(float(units) / 1e12)) if seen_costs else short
    return page(
        request,
        "overview.html",
        models=models,
        keys=costs_table(keys, viewer.currency) if seen_costs else usage_table(keys),
        table=table,
        failed=failed or 0,
        seen_costs=seen_costs,
        chart=svg(
            charts.stacked_bars("This month by model", models.labels, models.series(column), label)
        ),
    )


ROUTES = [Route("/", overview)]
