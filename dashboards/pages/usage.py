"""Usage: tokens in, cached and out, and requests, by model, adapter, key, project or member."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dashboards import charts, figures
from dashboards.filters import choice, date_range
from dashboards.pages.common import house_of, viewer_of, wants_csv
from dashboards.render import page, svg
from dashboards.tables import Column, Table

ABOUT = {
    "requests": "Answers given, also those that were blocked or broken off.",
    "input_tokens": "Tokens of prompts, cached ones included.",
    "cached_tokens": "Prompt tokens whose work was found in the prefix cache; billed at the lower price.",
    "output_tokens": "Tokens delivered to the client: what is billed.",
    "waived_tokens": "Tokens generated and not delivered; recorded and not billed.",
}


def usage_table(found: figures.Figures) -> Table:
    columns = [
        Column("group", figures.GROUPS[found.group_by]),
        *(Column(key, key.replace("_", " ").capitalize(), "whole", ABOUT[key]) for key in ABOUT),
    ]
    rows = [
        {"group": found.name(group), **{key: sums[key] for key in ABOUT}}
        for group, sums in sorted(found.counts.items(), key=lambda pair: -pair[1]["input_tokens"])
    ]
    return Table(f"Usage by {figures.GROUPS[found.group_by].lower()}", columns, rows)


def usage(request: Request) -> Response:
    viewer, house = viewer_of(request, "usage"), house_of(request)
    now = house.clock.now()
    span = date_range(request, now)
    group_by = choice(request, "by", tuple(figures.GROUPS), "model")
    with house.database.read() as session:
        found = figures.read(session, viewer.scope, span, now, group_by)
    table = usage_table(found)
    if wants_csv(request):
        return table.csv(f"usage-{span.first}-{span.last}")
    uncached = [
        a - b
        for a, b in zip(
            found.per_step("input_tokens"), found.per_step("cached_tokens"), strict=True
        )
    ]
    tokens = [
        charts.Series("input, computed", uncached),
        charts.Series("input, cached", found.per_step("cached_tokens")),
        charts.Series("output", found.per_step("output_tokens")),
    ]
    return page(
        request,
        "usage.html",
        span=span,
        by=group_by,
        groups=figures.GROUPS,
        table=table,
        figures=found,
        about=ABOUT,
        tokens=svg(charts.stacked_bars("Tokens by kind", found.labels, tokens)),
        requests=svg(charts.stacked_bars("Requests", found.labels, found.series("requests"))),
    )


ROUTES = [Route("/usage", usage)]
