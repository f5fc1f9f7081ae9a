"""Organisations: usage and cost of the viewer's organisation and of all below it."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.organisations import organisation_usage
from dashboards.filters import choice, date_range
from dashboards.page_data import PageData, show
from dashboards.pages.common import deps_of, viewer_of, wants_csv
from dashboards.tables import Column, Table

PATH = "/organisations"
_GROUPS = {"organisation": "Organisation", "model": "Organisation and model"}
_PAYS = {"parent": "its parent", "self": "itself", "": ""}
_PLACE = [
    Column("tenant", "Organisation"),
    Column("parent", "Below"),
    Column("payer", "Paid by"),
]
_SUMS = [
    Column("requests", "Requests", "whole"),
    Column("input_tokens", "Input tokens", "whole", "Including cached tokens."),
    Column("cached_tokens", "Cached", "whole"),
    Column("output_tokens", "Output tokens", "whole"),
    Column("amount", "Cost", "money", "Usage before tax, fees and credit."),
    Column("markup_percent", "Mark-up, %", "figure"),
    Column("markup", "Mark-up", "money", "Borne by the organisation, for its parent."),
    Column("with_markup", "Cost with mark-up", "money"),
]


def page_of(request: Request) -> Response:
    viewer, deps = viewer_of(request, "costs"), deps_of(request)
    now = deps.clock.now()
    span = date_range(request, now, now.day)
    by = choice(request, "by", tuple(_GROUPS), "organisation")
    with deps.database.report() as session:
        found = organisation_usage.read(
            session, viewer.scope, span.start, span.end, by_model=by == "model"
        )
    rows = [_row(row, viewer.currency) for row in found]
    model = [Column("model", "Model")] if by == "model" else []
    empty = "No usage in this period, and no organisation below yours. The operator links them."
    table = Table(
        "Usage by organisation", [*_PLACE, *model, *_SUMS], rows, totals=False, empty=empty
    )
    if wants_csv(request):
        return table.csv(f"organisations-{span.first}-{span.last}")
    page_data = PageData(
        "Organisations",
        "Usage of your organisation and of those below it, each since it joined.",
        tables=[table],
        span=span,
        groups=_GROUPS,
        by=by,
    )
    return show(request, page_data)


def _row(row: dict[str, Any], currency: str) -> dict[str, Any]:
    return {
        **row,
        "currency": row["currency"] or currency,
        "payer": _PAYS[row["pays"]],
        "with_markup": row["amount"] + row["markup"],
        "model": row["model"] or "–",
    }


ROUTES = [Route(PATH, page_of)]
