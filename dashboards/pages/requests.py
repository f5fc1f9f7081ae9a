"""The request log: one row per request, without text, and the details of a single request."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.usage.day_range import Range
from billing.usage.tables import Charge, UsageEventRow
from core.errors import BadRequest, NotFound
from core.events import UsageKind
from core.ids import moment_of
from core.tenants.models import ApiKey, Member, Project
from core.tenants.scope import TenantScope
from dashboards import charts, compared_periods, explorer, moved_requests, request_log
from dashboards.backend import EngineView
from dashboards.compared_periods import Outcomes
from dashboards.filters import choice
from dashboards.formats import change, counted, moment, money
from dashboards.live_requests import live_response
from dashboards.page_data import PageData, Tile, show
from dashboards.pages.common import deps_of, root_of, viewer_of, wants_csv
from dashboards.query_filters import Filters, filters_of
from dashboards.render import page, svg
from dashboards.scales import grouped
from dashboards.tables import Column, Table, csv_stream
from dashboards.viewer import Viewer
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
    log_query = _ordered(request, viewer.scope, span, columns)
    cursor = request_log.cursor_of(request.query_params, log_query.sort)
    lacks: list[str] = []
    with deps.database.report() as session:
        filters = filters_of(session, viewer.scope, explored.query)
        log_query = replace(log_query, conditions=filters.events)
        if wants_csv(request):
            return csv_stream(
                f"requests-{span.first}-{span.last}",
                columns,
                (_row(*found, "") for found in request_log.all_rows(deps.database, log_query)),
                viewer.currency,
            )
        found = request_log.page_of(session, log_query, cursor, PAGE_ROWS, lacks)
        bar = explorer.bar_of(request, session, viewer.scope, explored, today)
        compared, problem = _compared(request, session, (viewer, filters, span))
    root = root_of(request)
    table = Table(
        _caption(found, log_query),
        columns,
        [_row(event, amount, root) for event, amount in found.rows],
        viewer.currency,
        totals=False,
        sort=_sort_links(request, columns, log_query),
        empty="No requests match in this period.",
        next_step=("/playground", "Send a request"),
    )
    page_data = PageData(
        "Requests",
        _LEAD,
        tiles=_tiles(*compared, viewer.currency, sees_costs) if compared else [],
        tables=[table],
        bar=bar,
        views=[compared_periods.link(request)],
        pager=_pager(request, found, log_query),
        live=log_query.by_time and log_query.falling and not cursor,
        problem=f"Moved days are not shown. {lacks[0]}" if lacks else problem,
    )
    return show(request, page_data)


def live(request: Request) -> Response:
    """The rows of requests that the query finds, as they arrive."""
    viewer, deps = viewer_of(request, "usage"), deps_of(request)
    sees_costs = deps.auth.may(viewer, "costs", "read")
    columns = COLUMNS if sees_costs else COLUMNS[:-1]
    explored = explorer.read_query(request, deps.clock.now().date(), 7, sees_costs)
    with deps.database.read() as session:
        filters = filters_of(session, viewer.scope, explored.query)
    log_query = request_log.LogQuery(viewer.scope, explored.span, filters.events)
    root = root_of(request)

    def _table(rows: list[request_log.LogRow]) -> Table:
        return Table("", columns, [_row(*each, root) for each in rows], viewer.currency)

    return live_response(request, deps.database, deps.clock, log_query, _table)


def _compared(
    request: Request, session: Session, asked: tuple[Viewer, Filters, Range]
) -> tuple[tuple[Outcomes, Outcomes] | None, str]:
    """The period and the one before if they are wanted, or why they are not compared."""
    viewer, filters, span = asked
    if not compared_periods.wanted(request):
        return None, ""
    now = deps_of(request).clock.now()
    try:
        return compared_periods.outcomes(session, viewer.scope, filters, span, now), ""
    except BadRequest as error:
        return None, f"The periods are not compared. {error}"


def _tiles(found: Outcomes, earlier: Outcomes, currency: str, sees_costs: bool) -> list[Tile]:
    def _tokens(title: str, column: str) -> Tile:
        now, then = found.usage.total(column), earlier.usage.total(column)
        return Tile(title, grouped(now), change(now, then))

    def _count(title: str, now: int, then: int, about: str) -> Tile:
        return Tile(title, grouped(now), change(now, then), about)

    spent, before = found.usage.total("amount"), earlier.usage.total("amount")
    against = change(spent, before, lambda units: money(units, currency))
    return [
        _count("Requests", found.requests, earlier.requests, "That match, whatever their status."),
        _count("Rejected", found.refused, earlier.refused, "Status 400 to 499."),
        _count("Server errors", found.failed, earlier.failed, "Status 500 or above."),
        _tokens("Input tokens", "input_tokens"),
        _tokens("Output tokens", "output_tokens"),
        *([Tile("Charges", money(spent, currency), against)] if sees_costs else []),
    ]


_LEAD = "One row per request. Prompts and responses are not stored."


def _ordered(
    request: Request, scope: TenantScope, span: Range, columns: Sequence[Column]
) -> request_log.LogQuery:
    """In the order of `sort` in the URL; `-key` is descending. The newest first without it."""
    keys = [column.key for column in columns]
    wanted = choice(request, "sort", (*keys, *(f"-{key}" for key in keys)), "-at")
    key, falling = wanted.removeprefix("-"), wanted.startswith("-")
    return request_log.LogQuery(scope, span, sort=key, falling=falling)


def _sort_links(
    request: Request, columns: Sequence[Column], log_query: request_log.LogQuery
) -> dict[str, tuple[str, str]]:
    links = {}
    for column in columns:
        target, state = f"-{column.key}" if column.is_number else column.key, "none"
        if column.key == log_query.sort:
            target = column.key if log_query.falling else f"-{column.key}"
            state = "descending" if log_query.falling else "ascending"
        links[column.key] = (explorer.address(request, sort=target), state)
    return links


def _caption(found: request_log.LogPage, log_query: request_log.LogQuery) -> str:
    if not found.rows:
        return "Requests"
    count = counted(len(found.rows), "request")
    if not log_query.by_time:
        return f"{count}, sorted among the newest {grouped(request_log.SORTED)} that match"
    first, last = found.rows[0][0].occurred_at, found.rows[-1][0].occurred_at
    return f"{count}, from {moment(first)} {'back ' if log_query.falling else ''}to {moment(last)}"


def _pager(
    request: Request, found: request_log.LogPage, log_query: request_log.LogQuery
) -> list[tuple[str, str]]:
    """Links to other pages, which keep the filters. The cursor is the page's first or last row."""
    newest_first = log_query.by_time and log_query.falling
    names = ("Newest", "Newer", "Older") if newest_first else ("First", "Previous", "Next")
    links = []
    if found.earlier:
        links.append((names[0], explorer.address(request)))
        links.append((names[1], explorer.address(request, after=found.earlier)))
    if found.later:
        links.append((names[2], explorer.address(request, before=found.later)))
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
        "amount": None if amount is None else int(amount),
    }


def request_page(request: Request) -> Response:
    """Timing, tokens, price components, safety and routing of one request."""
    viewer, deps = viewer_of(request, "usage"), deps_of(request)
    request_id = request.path_params["request_id"]
    with deps.database.read() as session:
        event, charge = session.get(UsageEventRow, request_id), None
        if event is None:
            event, charge = moved_requests.find(session, viewer.scope, request_id)
        foreign = event is None or event.tenant_id != viewer.scope.tenant_id
        other = viewer.scope.project_id and event and event.project_id != viewer.scope.project_id
        if event is None or foreign or other:
            raise NotFound(
                f"There is no request {request_id[:80]!r}.", next_step="Choose one from the list."
            )
        charge = charge or session.get(Charge, request_id)
        found = session.scalars(
            select(Decision).where(
                Decision.request_id == request_id, Decision.tenant_id == event.tenant_id
            )
        ).all()
        names = _names(session, event)
    sees_costs = deps.auth.may(viewer, "costs", "read")
    steps = _steps(event, guarded=any(each.direction == "input" for each in found))
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
        cache=_cache(deps.backend.engines(), event),
        replay=_replay(event),
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
    text = json.dumps(body, indent=2, ensure_ascii=False).replace("'", "'\\''")
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


def _cache(engines: Iterable[EngineView], event: UsageEventRow) -> tuple[str, Markup] | None:
    """How much of the prompt the engine found, in its blocks; None where they are not known."""
    size = next((each.block_size for each in engines if each.engine_id == event.engine_id), 0)
    if not size or not event.input_tokens:
        return None
    hits, total = event.cached_tokens // size, -(-event.input_tokens // size)
    words = f"{hits} of {total} blocks of {size} tokens were in the prefix cache"
    return words, svg(charts.blocks(words, hits, total))


def _replay(event: UsageEventRow) -> str:
    """The playground with the request's model; empty for what is no chat."""
    if event.kind not in (UsageKind.GENERATION, UsageKind.CACHE_HIT) or event.route not in _CHATS:
        return ""
    model = f"{event.model}:{event.adapter}" if event.adapter else event.model
    return f"/playground?{urlencode({'model': model, 'project': event.project_id})}"


_CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions")


def _steps(event: UsageEventRow, *, guarded: bool) -> list[tuple[str, int]]:
    """Milliseconds per stage, in order. Those from the queue on add up to the duration."""
    waited = min(event.queue_ms, event.duration_ms)
    before = [("limits and guard" if guarded else "limits", _before_ms(event))]
    if event.first_token_ms is None:
        return [*before, ("queue", waited), ("processing", event.duration_ms - waited)]
    first = max(waited, event.first_token_ms)
    return [
        *before,
        ("queue", waited),
        ("prefill", first - waited),
        ("decode", max(0, event.duration_ms - first)),
    ]


def _before_ms(event: UsageEventRow) -> int:
    """From the request's arrival, when its id is made, to its admission."""
    try:
        arrived = moment_of(event.request_id)
    except ValueError:
        return 0
    waited = round(event.occurred_at.timestamp() * 1000) - arrived
    return waited if 0 <= waited < _LONGEST_BEFORE_MS else 0  # an id of another time is no arrival


_LONGEST_BEFORE_MS = 600_000


ROUTES = [
    Route("/requests", requests),
    Route("/requests/live", live),
    Route("/requests/{request_id}", request_page),
]
