"""Safety: moderation decisions by category, the latest decisions, and appeals."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dashboards import charts, moderation_totals, usage_totals
from dashboards.filters import date_range
from dashboards.formats import counted, share
from dashboards.page_data import Chart, Form, Input, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    redirect_with_notice,
    root_of,
    viewer_of,
    wants_csv,
)
from dashboards.render import svg
from dashboards.scales import count_of, grouped
from dashboards.tables import Column, Table
from moderation import appeals
from moderation.models import Appeal, Decision
from moderation.records import decisions

PATH = "/safety"
MAX_ROWS = 50
CATEGORIES = [
    Column("category", "Category"),
    Column("annotate", "Annotated", "whole", "Delivered with a header that names the category."),
    Column("redact", "Redacted", "whole", "Delivered without the flagged part."),
    Column("block", "Blocked", "whole", "Rejected, or the stream was ended."),
    Column("total", "All", "whole"),
]
DECISIONS = [
    Column("at", "When", "moment"),
    Column("request", "Request", link="href", brief=True),
    Column("direction", "Direction"),
    Column("action", "Action", "badge"),
    Column("found", "Categories and scores"),
    Column("policy", "Policy version", "code"),
]
APPEALS = [
    Column("at", "Opened", "moment"),
    Column("request", "Request", link="href", brief=True),
    Column("reason", "Reason"),
    Column("status", "State", "badge"),
    Column("answer", "Answer"),
]


def page_of(request: Request) -> Response:
    viewer, deps = viewer_of(request, "moderation"), deps_of(request)
    now = deps.clock.now()
    span = date_range(request, now)
    with deps.database.read() as session:
        counted = moderation_totals.read(session, viewer.scope, span)
        used = usage_totals.read(session, viewer.scope, span, now, "model")
        latest = decisions(
            session, viewer.scope, since=span.start, until=span.end, acted=True, limit=MAX_ROWS
        )
        objected = appeals.appeals(session, viewer.scope)
    may_appeal = deps.auth.may(viewer, "moderation", "write")
    known = {(each.request_id, each.direction) for each in objected}
    root = root_of(request)
    rows = [
        _row(each, root, may_appeal and (each.request_id, each.direction) not in known)
        for each in latest
    ]
    columns = [*DECISIONS, Column("acts", "Appeal", "acts")] if may_appeal else DECISIONS
    empty = "Nothing was flagged in this period. Allowed decisions are in the export."
    table = Table(_latest(len(rows)), columns, rows, totals=False, empty=empty)
    if wants_csv(request):
        return table.csv(f"safety-{span.first}-{span.last}")
    by_category = Table("By category", CATEGORIES, counted.rows(), totals=False, empty=empty)
    page_data = PageData(
        "Safety",
        "Decisions on prompts and responses. Only a hash, scores and offsets are stored, never text.",
        span=span,
        tiles=_tiles(counted, used.total("requests")),
        charts=[_chart(counted)] if counted.flagged else [],
        tables=[by_category, table],
        after=[
            Table(
                "Appeals",
                APPEALS,
                [_appeal(each, root) for each in objected],
                totals=False,
                empty="No appeals. You can appeal a decision in the table above.",
            )
        ],
        link=("/safety/policy", "View, test and change the policy"),
    )
    return show(request, page_data)


def _latest(count: int) -> str:
    return "Decisions" if not count else f"The latest {counted(count, 'decision')}"


def _tiles(counted: moderation_totals.ModerationTotals, checked: int) -> list[Tile]:
    flagged, blocked = counted.flagged, counted.by_action["block"]
    return [
        Tile("Checked", grouped(checked), about="Rated requests of this period; each is screened."),
        Tile("Flagged", grouped(flagged), share(flagged, checked), "Decisions other than allow."),
        Tile("Redacted", grouped(counted.by_action["redact"])),
        Tile("Blocked", grouped(blocked), share(blocked, checked)),
    ]


def _chart(counted: moderation_totals.ModerationTotals) -> Chart:
    rows = counted.rows()[:12]
    series = [
        charts.Series(words, [row[action] for row in rows])
        for action, words in (
            ("annotate", "annotated"),
            ("redact", "redacted"),
            ("block", "blocked"),
        )
    ]
    labels = [row["category"] for row in rows]
    drawn = charts.stacked_bars("Decisions by category", labels, series, value=count_of("decision"))
    return Chart("By category", svg(drawn))


def _row(each: Decision, root: str, may_appeal: bool) -> dict[str, Any]:
    found = [
        f"{name} {each.scores[name]:.2f}" if name in each.scores else name
        for name in each.categories
    ]
    fields = {"act": "appeal", "request": each.request_id, "direction": each.direction}
    why = [Input("reason", "Why the decision is wrong")]
    return {
        "at": each.at,
        "request": each.request_id,
        "href": f"{root}/requests/{each.request_id}",
        "direction": each.direction,
        "action": each.action,
        "found": ", ".join(found) or "unscanned",
        "policy": each.policy_version,
        "acts": [Form(PATH, "Appeal", fields, why)] if may_appeal else [],
    }


def _appeal(each: Appeal, root: str) -> dict[str, Any]:
    return {
        "at": each.opened_at,
        "request": each.request_id,
        "href": f"{root}/requests/{each.request_id}",
        "reason": each.reason,
        "status": each.status,
        "answer": each.answer,
    }


def _open(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "moderation", "write"), deps_of(request)
    with deps.database.transaction() as session:
        appeals.open_appeal(
            session,
            viewer.scope,
            deps.clock,
            form_fields.get("request", ""),
            form_fields.get("reason", ""),
            form_fields.get("direction", "input"),
        )
    return redirect_with_notice(request, PATH, "appeal-opened")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(PATH, form_handler(page_of, appeal=_open), methods=["POST"]),
]
