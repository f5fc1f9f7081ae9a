"""The request log: one row per request, without text, and the details of a single request."""

from typing import Any
from urllib.parse import urlencode

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.models import Charge, UsageEventRow
from core.errors import NotFound
from dashboards import request_log
from dashboards.filters import choice, date_range
from dashboards.formats import moment
from dashboards.page_data import Input, PageData, show
from dashboards.pages.common import deps_of, root_of, viewer_of, wants_csv
from dashboards.render import page
from dashboards.tables import Column, Table, csv_stream
from moderation.models import Decision

PAGE_ROWS = 50
SHOWN = {"all": "All", "failed": "Server errors", "refused": "Rejected"}
COLUMNS = [
    Column("request", "Request", link="href", brief=True),
    Column("at", "Admitted", "moment"),
    Column("name", "Model"),
    Column("status", "Status"),
    Column("end", "Ended by"),
    Column("input_tokens", "Input", "whole"),
    Column("cached_tokens", "Cached", "whole"),
    Column("output_tokens", "Output", "whole"),
    Column(
        "first_ms",
        "First token, ms",
        "whole",
        "Time from request to first token; empty without a token.",
    ),
    Column("duration_ms", "Time, ms", "whole", "Time from request to last byte."),
    Column("amount", "Charge", "money", "At the price pinned at admission."),
]


def requests(request: Request) -> Response:
    """The requests of the date range, one page at a time. Their text is not stored."""
    viewer, deps = viewer_of(request, "usage"), deps_of(request)
    span = date_range(request, deps.clock.now(), 7)
    kind = choice(request, "show", tuple(SHOWN), "all")
    sees_costs = deps.auth.may(viewer, "costs", "read")
    columns = COLUMNS if sees_costs else COLUMNS[:-1]
    log_query = request_log.LogQuery(viewer.scope, span, kind)
    if wants_csv(request):
        return csv_stream(
            f"requests-{span.first}-{span.last}",
            columns,
            (_row(*found, "") for found in request_log.all_rows(deps.database, log_query)),
            viewer.currency,
        )
    cursor = request_log.cursor_of(request.query_params)
    with deps.database.read() as session:
        found = request_log.page_of(session, log_query, cursor, PAGE_ROWS)
    root = root_of(request)
    table = Table(
        _caption(found),
        columns,
        [_row(event, amount, root) for event, amount in found.rows],
        viewer.currency,
        totals=False,
        empty="No such requests in this period.",
        next_step=("/playground", "Send a request"),
    )
    page_data = PageData(
        "Requests",
        "One row per request, newest first. Prompts and responses are not stored.",
        tables=[table],
        narrow=[Input("show", "Show", "select", kind, list(SHOWN.items()))],
        span=span,
        pager=_pager(request, found),
    )
    return show(request, page_data)


def _caption(found: request_log.LogPage) -> str:
    if not found.rows:
        return "Requests"
    newest, oldest = found.rows[0][0].occurred_at, found.rows[-1][0].occurred_at
    return f"{len(found.rows)} requests, from {moment(newest)} back to {moment(oldest)}"


def _pager(request: Request, found: request_log.LogPage) -> list[tuple[str, str]]:
    """Links to other pages, which keep the filters. The cursor is the page's first or last row."""
    kept = [(k, v) for k, v in request.query_params.items() if k in ("from", "to", "show") and v]
    links = []
    if found.newer:
        links.append(("Newest", f"?{urlencode(kept)}"))
        links.append(("Newer", f"?{urlencode([*kept, ('after', found.newer)])}"))
    if found.older:
        links.append(("Older", f"?{urlencode([*kept, ('before', found.older)])}"))
    return links


def _row(event: UsageEventRow, amount: int | None, root: str) -> dict[str, Any]:
    return {
        "request": event.request_id,
        "href": f"{root}/requests/{event.request_id}",
        "at": event.occurred_at,
        "name": f"{event.model}:{event.adapter}" if event.adapter else event.model,
        "status": str(event.status),
        "end": event.finish_reason,
        "input_tokens": event.input_tokens,
        "cached_tokens": event.cached_tokens,
        "output_tokens": event.output_tokens,
        "first_ms": event.first_token_ms,
        "duration_ms": event.duration_ms,
        "amount": int(amount or 0),
    }


def request_page(request: Request) -> Response:
    """Timing, tokens, price components, safety and routing of one request."""
    viewer, deps = viewer_of(request, "usage"), deps_of(request)
    request_id = request.path_params["request_id"]
    with deps.database.read() as session:
        event = session.get(UsageEventRow, request_id)
        foreign = event is None or event.tenant_id != viewer.scope.tenant_id
        other = viewer.scope.project_id and event and event.project_id != viewer.scope.project_id
        if event is None or foreign or other:
            raise NotFound(
                f"There is no request {request_id[:80]!r}.", next_step="Choose one from the list."
            )
        charge = session.get(Charge, request_id)
        found = session.scalars(
            select(Decision).where(
                Decision.request_id == request_id, Decision.tenant_id == event.tenant_id
            )
        ).all()
    sees_costs = deps.auth.may(viewer, "costs", "read")
    return page(
        request,
        "request.html",
        event=event,
        charge=charge if sees_costs else None,
        sees_costs=sees_costs,
        decisions=found,
        steps=_steps(event),
    )


def _steps(event: UsageEventRow) -> list[tuple[str, int]]:
    """Milliseconds per stage, in order. They add up to the duration."""
    waited = min(event.queue_ms, event.duration_ms)
    if event.first_token_ms is None:
        return [("in the queue", waited), ("processing", event.duration_ms - waited)]
    first = max(waited, event.first_token_ms)
    return [
        ("in the queue", waited),
        ("to the first token", first - waited),
        ("first to last token", max(0, event.duration_ms - first)),
    ]


ROUTES = [Route("/requests", requests), Route("/requests/{request_id}", request_page)]
