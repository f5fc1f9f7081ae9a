"""The request log: one row per request, without text, and the details of a single request."""

import json
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.models import Charge, UsageEventRow
from core.errors import BadRequest, NotFound
from core.tenants.models import ApiKey, Member, Project
from dashboards import charts, explorer, request_log
from dashboards.formats import moment
from dashboards.page_data import PageData, show
from dashboards.pages.common import deps_of, root_of, viewer_of, wants_csv
from dashboards.query_filters import filters_of
from dashboards.render import page, svg
from dashboards.tables import Column, Table, csv_stream
from moderation.models import Decision

PAGE_ROWS = 50
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
    """The requests that the query finds, one page at a time. Their text is not stored."""
    try:
        return _requests(request)
    except BadRequest as error:
        if wants_csv(request):
            raise
        bar = explorer.Bar(explorer.text_of(request), problem=str(error))
        return show(request, PageData("Requests", _LEAD, bar=bar), error.status)


def _requests(request: Request) -> Response:
    viewer, deps = viewer_of(request, "usage"), deps_of(request)
    today = deps.clock.now().date()
    sees_costs = deps.auth.may(viewer, "costs", "read")
    explored = explorer.read_query(request, today, 7, sees_costs)
    span = explored.span
    columns = COLUMNS if sees_costs else COLUMNS[:-1]
    cursor = request_log.cursor_of(request.query_params)
    with deps.database.report() as session:
        filters = filters_of(session, viewer.scope, explored.query)
        log_query = request_log.LogQuery(viewer.scope, span, filters.events)
        if wants_csv(request):
            return csv_stream(
                f"requests-{span.first}-{span.last}",
                columns,
                (_row(*found, "") for found in request_log.all_rows(deps.database, log_query)),
                viewer.currency,
            )
        found = request_log.page_of(session, log_query, cursor, PAGE_ROWS)
        bar = explorer.bar_of(request, session, viewer.scope, explored, today)
    root = root_of(request)
    table = Table(
        _caption(found),
        columns,
        [_row(event, amount, root) for event, amount in found.rows],
        viewer.currency,
        totals=False,
        empty="No requests match in this period.",
        next_step=("/playground", "Send a request"),
    )
    page_data = PageData(
        "Requests", _LEAD, tables=[table], bar=bar, pager=_pager(request, found), live=not cursor
    )
    return show(request, page_data)


_LEAD = "One row per request, newest first. Prompts and responses are not stored."


def _caption(found: request_log.LogPage) -> str:
    if not found.rows:
        return "Requests"
    newest, oldest = found.rows[0][0].occurred_at, found.rows[-1][0].occurred_at
    return f"{len(found.rows)} requests, from {moment(newest)} back to {moment(oldest)}"


def _pager(request: Request, found: request_log.LogPage) -> list[tuple[str, str]]:
    """Links to other pages, which keep the filters. The cursor is the page's first or last row."""
    links = []
    if found.newer:
        links.append(("Newest", explorer.address(request)))
        links.append(("Newer", explorer.address(request, after=found.newer)))
    if found.older:
        links.append(("Older", explorer.address(request, before=found.older)))
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
        names = _names(session, event)
    sees_costs = deps.auth.may(viewer, "costs", "read")
    steps = _steps(event)
    return page(
        request,
        "request.html",
        event=event,
        charge=charge if sees_costs else None,
        sees_costs=sees_costs,
        decisions=found,
        steps=steps,
        names=names,
        timeline=svg(charts.timeline("Request", steps)),
        curl=_curl(request, event),
    )


def _names(session: Session, event: UsageEventRow) -> list[tuple[str, str, str]]:
    """(label, name, field of the query) of the key, the project and the member."""
    key, project = session.get(ApiKey, event.key_id), session.get(Project, event.project_id)
    member = session.get(Member, event.member_id) if event.member_id else None
    return [
        ("Key", key.name if key else "", event.key_id),
        ("Project", project.name if project else "", event.project_id),
        *([("Member", member.email, member.id)] if member else []),
    ]


def _curl(request: Request, event: UsageEventRow) -> str:
    """The request with its model and route. Its text is not stored."""
    model = f"{event.model}:{event.adapter}" if event.adapter else event.model
    body: dict[str, Any] = {"model": model, **_SAMPLES.get(event.route, _CHAT)}
    if event.streamed:
        body["stream"] = True
    site = f"{request.url.scheme}://{request.url.netloc}"
    text = json.dumps(body, indent=2).replace("'", "'\\''")
    return (
        f"curl {site}{event.route} \\\n"
        '  -H "Authorization: Bearer $TOLLHOUSE_KEY" \\\n'
        f"  -H 'content-type: application/json' \\\n  -d '{text}'"
    )


_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "…"}]}
_SAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "…"},
    "/v1/responses": {"input": "…"},
    "/v1/embeddings": {"input": "…"},
    "/v1/moderations": {"input": "…"},
    "/v1/messages": {"max_tokens": 200, **_CHAT},
}


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
