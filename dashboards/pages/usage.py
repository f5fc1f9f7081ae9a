"""Usage: tokens, requests and service levels, by model, adapter, key, project or member."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.usage.tables import FIRST_COLUMNS, FIRST_TOKEN_MS
from billing.usage.usage_buckets import Width
from core.errors import BadRequest
from dashboards import charts, compared_periods, explorer, service_totals, usage_totals
from dashboards.filters import choice
from dashboards.formats import change, share
from dashboards.page_data import Chart, PageData, Tile, show
from dashboards.pages.common import deps_of, sorted_by, viewer_of, wants_csv
from dashboards.query_filters import filters_of
from dashboards.render import svg
from dashboards.scales import count_of, grouped
from dashboards.service_totals import ServiceTotals
from dashboards.tables import Column, Table

ABOUT = {
    "requests": "Requests without a server error, including blocked and aborted ones.",
    "input_tokens": "Prompt tokens, including cached ones.",
    "cached_tokens": "Prompt tokens found in the prefix cache; billed at the price of cached input.",
    "output_tokens": "Tokens delivered to the client, which are billed.",
    "waived_tokens": "Tokens generated but not delivered to the client, which are not billed.",
}
# Shown where there are any.
PARTS = {
    "cache_write_5m_tokens": "Prompt tokens that a provider wrote into its cache for five minutes.",
    "cache_write_1h_tokens": "Prompt tokens that a provider wrote into its cache for an hour.",
    "audio_input_tokens": "Prompt tokens of audio that no cache held.",
    "image_input_tokens": "Prompt tokens of images that no cache held.",
    "reasoning_tokens": "Delivered tokens of a provider's reasoning.",
    "audio_output_tokens": "Delivered tokens of audio.",
    "image_output_tokens": "Delivered tokens of images.",
    "searches": "Searches of the web by the provider's own tool.",
    "tool_calls": "Calls of the provider's other tools.",
}
SERVED = [
    Column(
        "first_50",
        "First token p50, ms",
        "figure",
        "Time from request to first token; half are faster.",
    ),
    Column(
        "first_95",
        "p95, ms",
        "figure",
        "95 % are faster. Interpolated within the classes of a histogram.",
    ),
    Column("first_99", "p99, ms", "figure"),
    Column("speed_50", "Tokens/s p50", "figure", "Of a response, after its first token."),
    Column("speed_95", "p95", "figure", "95 % of responses are faster."),
    Column("queue", "Mean wait, ms", "figure", "In the engine's queue, before its first step."),
    Column("refused", "Rejected", "whole", "Status 400 to 499."),
    Column("failed", "Failed", "whole", "Status 500 or above."),
]


def usage_table(found: usage_totals.UsageTotals) -> Table:
    shown = ABOUT | {key: about for key, about in PARTS.items() if found.total(key)}
    columns = [
        Column("group", usage_totals.ALL_GROUPS[found.group_by]),
        *(Column(key, key.replace("_", " ").capitalize(), "whole", shown[key]) for key in shown),
    ]
    rows = [
        {"group": found.name(group), **{key: sums[key] for key in shown}}
        for group, sums in sorted(found.counts.items(), key=lambda pair: -pair[1]["input_tokens"])
    ]
    empty = "No usage in this period. A request with any of your keys appears here within seconds."
    caption = f"Usage by {usage_totals.ALL_GROUPS[found.group_by].lower()}"
    return Table(caption, columns, rows, empty=empty, next_step=("/playground", "Send a request"))


def usage(request: Request) -> Response:
    try:
        return _usage(request)
    except BadRequest as error:
        if wants_csv(request):
            raise
        bar = explorer.Bar(explorer.text_of(request), problem=str(error))
        return show(request, PageData("Usage", _LEAD, bar=bar), error.status)


def _usage(request: Request) -> Response:
    viewer, deps = viewer_of(request, "usage"), deps_of(request)
    now = deps.clock.now()
    group_by = choice(request, "by", tuple(usage_totals.ALL_GROUPS), "model")
    usual = _USUAL_DAYS
    if group_by not in usage_totals.GROUPS and explorer.text_of(request):
        usual = 1  # single requests are read
    sees_costs = deps.auth.may(viewer, "costs", "read")
    explored = explorer.read_query(request, now.date(), usual, sees_costs)
    span, compared = explored.span, compared_periods.wanted(request)
    served_in = span  # service levels are rolled up by days of UTC
    with deps.database.report() as session:
        filters = filters_of(session, viewer.scope, explored.query)
        if filters.rolled_up is not None and group_by in usage_totals.GROUPS:
            span = span.of(viewer.timezone)
            served_in = span if span.width is Width.HOUR else served_in
        wanted = compared_periods.usage_filters(filters, group_by, span)
        if "conditions" in wanted:  # the page shows no amounts
            wanted["charges"] = any(term.field == "cost" for term in explored.query.terms)
        read_by = "engine_id" if group_by == "region" else group_by
        found = usage_totals.read(session, viewer.scope, span, now, read_by, **wanted)
        earlier = None
        if compared:
            past = explorer.before(span)
            earlier = usage_totals.read(session, viewer.scope, past, now, read_by, **wanted)
        if group_by == "region":
            found = usage_totals.by_region(found, deps.backend.regions())
        served = ServiceTotals()
        by_group: dict[str, ServiceTotals] = {}
        if filters.rolled_up is not None:
            grouped_by = group_by if group_by in usage_totals.GROUPS else ""
            served, by_group = service_totals.read(
                session,
                viewer.scope,
                served_in.start,
                served_in.end,
                served_in.width,
                grouped_by,
                filters=filters.rolled_up,
            )
        bar = None
        if not wants_csv(request):
            bar = explorer.bar_of(request, session, viewer.scope, explored, now.date())
    table = sorted_by(request, usage_table(found), "input_tokens")
    if wants_csv(request):
        return table.csv(f"usage-{span.first}-{span.last}")
    drawn = _charts(found, served) if table.rows else []
    if group_by in usage_totals.GROUPS:
        named = usage_totals.ALL_GROUPS[group_by]
        caption = f"Service levels by {named.lower()}"
        speeds = [_speed_row(found.name(group), each) for group, each in by_group.items()]
        speeds.sort(key=lambda row: row["group"])
    else:  # they are not measured by this group
        named, caption = "Of", "Service levels"
        speeds = [_speed_row("all requests", served)] if by_group else []
    levels = Table(caption, [Column("group", named), *SERVED], speeds, totals=False)
    page_data = PageData(
        "Usage",
        _LEAD,
        bar=bar,
        views=[compared_periods.link(request)],
        groups=usage_totals.ALL_GROUPS,
        by=group_by,
        tiles=_tiles(found, served, earlier),
        charts=drawn,
        tables=[table, levels] if table.rows and speeds else [table],
    )
    return show(request, page_data)


_LEAD = "Exact token counts and service levels. See Costs for charges."
_USUAL_DAYS = 30


def _tiles(
    found: usage_totals.UsageTotals,
    served: ServiceTotals,
    earlier: usage_totals.UsageTotals | None,
) -> list[Tile]:
    cached, input_tokens = found.total("cached_tokens"), found.total("input_tokens")

    def _against(column: str) -> str:
        return change(found.total(column), earlier.total(column)) if earlier else ""

    return [
        Tile("Requests", grouped(found.total("requests")), _against("requests"), ABOUT["requests"]),
        Tile(
            "Input tokens",
            grouped(input_tokens),
            _against("input_tokens"),
            ABOUT["input_tokens"],
        ),
        Tile(
            "Cached tokens",
            grouped(cached),
            _against("cached_tokens") or share(cached, input_tokens),
            ABOUT["cached_tokens"],
        ),
        Tile(
            "Output tokens",
            grouped(found.total("output_tokens")),
            _against("output_tokens"),
            ABOUT["output_tokens"],
        ),
        Tile(
            "First token, p95",
            _ms(served.first_token_ms(0.95)),
            f"p50 {_ms(served.first_token_ms(0.5))}",
            "Time from request to first token, of responses with a token.",
        ),
        Tile(
            "Tokens per second, p50",
            _number(served.speed(0.5)),
            f"95 % above {_number(served.speed(0.95))}",
            "Of a response, after its first token.",
        ),
    ]


def _charts(found: usage_totals.UsageTotals, served: ServiceTotals) -> list[Chart]:
    steps = zip(found.per_step("input_tokens"), found.per_step("cached_tokens"), strict=True)
    tokens = [
        charts.Series("input, computed", [input_tokens - cached for input_tokens, cached in steps]),
        charts.Series("input, cached", found.per_step("cached_tokens")),
        charts.Series("output", found.per_step("output_tokens")),
    ]
    requests = found.series("requests")
    drawn = [
        Chart(
            "Tokens",
            svg(
                charts.stacked_bars("Tokens by kind", found.labels, tokens, value=count_of("token"))
            ),
        ),
        Chart(
            "Requests",
            svg(charts.stacked_bars("Requests", found.labels, requests, value=count_of("request"))),
        ),
    ]
    classes = [served.sums[name] for name in FIRST_COLUMNS]
    if sum(classes):
        labels = [*(f"≤ {bound} ms" for bound in FIRST_TOKEN_MS), "longer"]
        series = [charts.Series("responses", classes)]
        picture = charts.stacked_bars(
            "Responses by time to first token", labels, series, value=count_of("response")
        )
        drawn.append(Chart("Time to first token", svg(picture)))
    return drawn


def _speed_row(name: str, each: ServiceTotals) -> dict[str, Any]:
    return {
        "group": name,
        "first_50": _number(each.first_token_ms(0.5)),
        "first_95": _number(each.first_token_ms(0.95)),
        "first_99": _number(each.first_token_ms(0.99)),
        "speed_50": _number(each.speed(0.5)),
        "speed_95": _number(each.speed(0.95)),
        "queue": f"{each.sums['queue_ms'] / max(1, each.sums['answers']):.0f}",
        "refused": each.sums["refused"],
        "failed": each.sums["failed"],
    }


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} ms"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


ROUTES = [Route("/usage", usage)]
