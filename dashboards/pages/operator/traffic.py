"""Traffic: is it well, where does it hurt; by model, adapter, engine and cause, for all tenants."""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from decimal import Decimal
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dashboards import traffic
from dashboards.filters import choice, decimal_field
from dashboards.page_data import Form, Input, PageData, Tile, show
from dashboards.pages.common import deps_of, operator_of, wants_csv
from dashboards.scales import grouped
from dashboards.tables import Column, Table
from dashboards.traffic import Traffic, TrafficRow

PATH = "/operator/traffic"
PERIODS = {
    "15m": ("last 15 minutes", timedelta(minutes=15)),
    "1h": ("last hour", timedelta(hours=1)),
    "6h": ("last 6 hours", timedelta(hours=6)),
    "24h": ("last 24 hours", timedelta(hours=24)),
}
_FAST_BURN = (
    14.4  # spends a month's budget in two days: the page of Google's SRE workbook, chapter 5
)
_FIGURES = [
    Column("requests", "Requests", "whole"),
    Column("failed", "Failed", "whole", "Requests that ended with a 5xx status."),
    Column("failed_share", "Failed share", "figure", "Of requests without a 4xx status."),
    Column("queue", "Queued, mean", "figure", "Time in the engine's queue, in milliseconds."),
    Column("p50", "First token p50", "figure"),
    Column("p95", "First token p95", "figure"),
    Column("output", "Output tokens/s", "figure", "Delivered to clients, over the whole period."),
    Column("waived", "Waived tokens", "whole", "Generated but not delivered, and not billed."),
    Column("cached", "Cached input", "figure", "Share of input tokens found in the prefix cache."),
]
CAUSES = [
    Column("status", "Status", "whole"),
    Column("reason", "Finish reason", "code"),
    Column("model", "Model"),
    Column("engine", "Engine", "code"),
    Column("requests", "Requests", "whole"),
]


def page_of(request: Request) -> Response:
    operator_of(request, "operations")
    deps = deps_of(request)
    label, length = PERIODS[choice(request, "period", tuple(PERIODS), "1h")]
    objective = _objective(request)
    now = deps.clock.now()
    with deps.database.report() as session:
        rows = traffic.read(session, now - length, now)
    seconds = length.total_seconds()
    models = _table("Models", traffic.grouped_by(rows, lambda row: row.model), seconds)
    if wants_csv(request):
        return models.csv("traffic")
    adapters = traffic.grouped_by(
        (row for row in rows if row.adapter), lambda row: f"{row.model}:{row.adapter}"
    )
    engines = traffic.grouped_by(rows, lambda row: row.engine_id)
    page_data = PageData(
        "Traffic",
        f"Requests of all tenants that arrived in the {label} and have ended.",
        tiles=_tiles(traffic.total(rows), objective, seconds),
        tables=[
            models,
            _table("Engines", engines, seconds),
            _table("Adapters", adapters, seconds),
            causes_table(rows),
        ],
        actions=[_period_form(request, objective)],
        remarks=[
            "Requests refused before admission (a wrong key, a limit) are not here: "
            "`tollhouse_rejections_total` counts them by reason."
        ],
    )
    return show(request, page_data)


def _tiles(everything: Traffic, objective: Decimal, seconds: float) -> list[Tile]:
    burn = burn_tile(everything, objective)
    return [
        Tile(
            "Requests",
            grouped(everything.requests),
            f"{everything.requests / seconds:,.2f} a second",
        ),
        Tile(
            "Served",
            f"{100 * (1 - everything.failed_share):.2f} %" if everything.requests else "–",
            f"objective {objective} %",
            "Requests without a 5xx status, among those without a 4xx status.",
            burn.state,
        ),
        burn,
        *speed_tiles(everything, timedelta(seconds=seconds)),
    ]


def burn_tile(everything: Traffic, objective: Decimal) -> Tile:
    burn = everything.failed_share / float(1 - objective / 100)
    state = "bad" if burn >= _FAST_BURN else "warn" if burn > 1 else "good"
    return Tile(
        "Error budget",
        f"{burn:.1f}×" if everything.requests else "–",
        "of the rate that spends it in its period",
        "1× uses up exactly what the objective allows; 14× and more calls for action now.",
        state if everything.requests else "",
    )


def speed_tiles(everything: Traffic, length: timedelta) -> list[Tile]:
    output = everything.tokens["output_tokens"] / length.total_seconds()
    first = everything.first_token_ms(0.95)
    return [
        Tile("First token p95", _ms(first), "no streams" if first is None else "all models"),
        Tile("Goodput", f"{output:,.1f}", "output tokens a second"),
        Tile("Cached input", _percent(everything.cached_share)),
    ]


def _table(title: str, groups: Mapping[str, Traffic], seconds: float) -> Table:
    name = title.removesuffix("s")
    columns = [Column("name", name, "code" if name == "Engine" else "text"), *_FIGURES]
    rows: list[dict[str, Any]] = [
        {
            "name": each or "none",
            "requests": one.requests,
            "failed": one.failed,
            "failed_share": _percent(one.failed_share),
            "queue": f"{one.tokens['queue_ms'] / one.requests:,.0f} ms",
            "p50": _ms(one.first_token_ms(0.5)),
            "p95": _ms(one.first_token_ms(0.95)),
            "output": f"{one.tokens['output_tokens'] / seconds:,.1f}",
            "waived": one.tokens["waived_tokens"],
            "cached": _percent(one.cached_share),
        }
        for each, one in groups.items()
    ]
    return Table(title, columns, rows, totals=False, empty="No requests in this period.")


def causes_table(rows: Iterable[TrafficRow], title: str = "Errors by cause") -> Table:
    counts: dict[tuple[int, str, str, str], int] = {}
    for row in rows:
        if row.status >= 400:
            cause = (row.status, row.finish_reason, row.model, row.engine_id)
            counts[cause] = counts.get(cause, 0) + row.requests
    found: list[dict[str, Any]] = [
        {"status": status, "reason": reason, "model": model, "engine": engine, "requests": count}
        for (status, reason, model, engine), count in sorted(
            counts.items(), key=lambda item: (-item[1], item[0])
        )
    ]
    return Table(title, CAUSES, found, totals=False, empty="No errors in this period.")


def _period_form(request: Request, objective: Decimal) -> Form:
    chosen = request.query_params.get("period") or "1h"
    inputs = [
        Input(
            "period",
            "Period",
            "select",
            chosen,
            [(key, words) for key, (words, _) in PERIODS.items()],
        ),
        Input("objective", "Objective in %", "number", str(objective), hint="below 100"),
    ]
    return Form(PATH, "Show", inputs=inputs, title="Period and objective", method="get")


def _objective(request: Request) -> Decimal:
    next_step = "Use a percentage above 0 and below 100, such as 99.9."
    return decimal_field(request, "objective", "99.9", lambda value: 0 < value < 100, next_step)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f} ms"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


ROUTES = [Route(PATH, page_of)]
