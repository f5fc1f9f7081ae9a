"""Pages that are one table: requests, adapters, limits, safety, team, the audit log."""

from typing import Any

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.models import Charge, UsageEventRow
from core.errors import NotFound
from core.tenants import audit, limits
from core.tenants.models import Adapter, Member, Tenant
from core.tenants.plans import LimitRule, Unit
from dashboards.filters import date_range
from dashboards.pages.common import house_of, viewer_of, wants_csv
from dashboards.render import page
from dashboards.tables import Column, Table
from moderation.records import decisions

MOST_ROWS = 200


def requests(request: Request) -> Response:
    """The latest requests of the range. No text is kept, so none is shown."""
    viewer, house = viewer_of(request, "usage"), house_of(request)
    span = date_range(request, house.clock.now(), 7)
    event = UsageEventRow
    query = (
        select(event, Charge.amount)
        .join(Charge, Charge.request_id == event.request_id, isouter=True)
        .where(
            event.tenant_id == viewer.scope.tenant_id,
            event.occurred_at >= span.start,
            event.occurred_at < span.end,
        )
        .order_by(event.request_id.desc())
        .limit(MOST_ROWS)
    )
    if viewer.scope.project_id:
        query = query.where(event.project_id == viewer.scope.project_id)
    root = request.scope.get("root_path", "")
    with house.database.read() as session:
        rows = [_request_row(found, amount, root) for found, amount in session.execute(query)]
    columns = [
        Column("request", "Request"),
        Column("at", "Admitted", "moment"),
        Column("name", "Model"),
        Column("status", "Status"),
        Column("end", "Ended by"),
        Column("input_tokens", "Input", "whole"),
        Column("cached_tokens", "Cached", "whole"),
        Column("output_tokens", "Output", "whole"),
        Column("duration_ms", "Time, ms", "whole", "Door to last byte."),
        Column("amount", "Charge", "money", "At the price that was pinned at admission."),
    ]
    table = Table(f"The latest {len(rows)} requests", columns, rows, viewer.currency, totals=False)
    if wants_csv(request):
        return table.csv(f"requests-{span.first}-{span.last}")
    return _listing(
        request,
        "Requests",
        "One row a request, the newest first.",
        table,
        span,
        {"request": "href"},
    )


def _request_row(event: UsageEventRow, amount: int | None, root: str) -> dict[str, Any]:
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
        "duration_ms": event.duration_ms,
        "amount": int(amount or 0),
    }


def one_request(request: Request) -> Response:
    """Timing, tokens, price components, safety and routing of one request."""
    viewer, house = viewer_of(request, "usage"), house_of(request)
    with house.database.read() as session:
        event = session.get(UsageEventRow, request.path_params["request_id"])
        charge = session.get(Charge, request.path_params["request_id"])
    foreign = event is None or event.tenant_id != viewer.scope.tenant_id
    if event is None or foreign:
        raise NotFound("There is no such request.", next_step="Look in the list.")
    return page(request, "request.html", event=event, charge=charge)


def adapters(request: Request) -> Response:
    viewer, house = viewer_of(request, "adapters"), house_of(request)
    query = select(Adapter).where(
        Adapter.tenant_id == viewer.scope.tenant_id, Adapter.removed_at.is_(None)
    )
    with house.database.read() as session:
        rows = [
            {
                "name": f"{each.base_model}:{each.name}",
                "digest": each.digest[:16],
                "rank": each.rank,
                "bytes": each.bytes,
                "at": each.created_at,
            }
            for each in session.scalars(query.order_by(Adapter.name))
        ]
    columns = [
        Column("name", "Name in `model`"),
        Column("digest", "Digest, first 16", about="An adapter is its weights' SHA-256."),
        Column("rank", "Rank", "whole"),
        Column("bytes", "Bytes", "whole"),
        Column("at", "Registered", "moment"),
    ]
    lead = "Register one with `tollhouse adapter add`, /admin/v1/adapters or /v1/load_lora_adapter."
    return _listing(request, "Adapters", lead, Table("Adapters", columns, rows, totals=False))


def limit_rules(request: Request) -> Response:
    viewer, house = viewer_of(request, "limits"), house_of(request)
    with house.database.read() as session:
        tenant = session.get_one(Tenant, viewer.scope.tenant_id)
        plan = limits.plan_of(session, tenant)
    rows = [
        {
            "scope": r.scope,
            "unit": r.unit,
            "per": _period(r),
            "limit": r.limit,
            "mode": _mode(r),
        }
        for r in plan.rules
    ]
    columns = [
        Column("scope", "Of each"),
        Column("unit", "What"),
        Column("per", "Per"),
        Column("limit", "At most", "whole"),
        Column("mode", "Mode"),
    ]
    lead = f"Plan {plan.name}. Buckets refill continuously: there is no window to wait for."
    return _listing(request, "Limits", lead, Table("Limits in force", columns, rows, totals=False))


def safety(request: Request) -> Response:
    viewer, house = viewer_of(request, "moderation"), house_of(request)
    with house.database.read() as session:
        rows = [
            {
                "at": each.at,
                "request": each.request_id,
                "direction": each.direction,
                "action": each.action,
                "categories": ", ".join(each.categories) or "unscanned",
                "policy": each.policy_version,
            }
            for each in decisions(session, viewer.scope, limit=MOST_ROWS)
        ]
    columns = [
        Column("at", "When", "moment"),
        Column("request", "Request"),
        Column("direction", "Direction"),
        Column("action", "Action"),
        Column("categories", "Categories"),
        Column("policy", "Policy version"),
    ]
    lead = "What the screen and the guard found. No text is kept: a hash, scores and offsets are."
    return _listing(request, "Safety", lead, Table("Decisions", columns, rows, totals=False))


def team(request: Request) -> Response:
    viewer, house = viewer_of(request, "members"), house_of(request)
    query = select(Member).where(Member.tenant_id == viewer.scope.tenant_id).order_by(Member.email)
    with house.database.read() as session:
        rows = [
            {
                "email": each.email,
                "name": each.name,
                "role": each.role,
                "state": "disabled" if each.disabled_at else "active",
                "seen": each.last_seen_at,
            }
            for each in session.scalars(query)
        ]
        log = [
            {
                "at": each.at,
                "actor": each.actor,
                "action": each.action,
                "target": each.target,
            }
            for each in audit.entries(session, viewer.scope)
        ]
    members = Table(
        "Members",
        [
            Column("email", "E-mail"),
            Column("name", "Name"),
            Column("role", "Role"),
            Column("state", "State"),
            Column("seen", "Last seen", "moment"),
        ],
        rows,
        totals=False,
    )
    changes = Table(
        "Changes, the newest first",
        [
            Column("at", "When", "moment"),
            Column("actor", "Who"),
            Column("action", "What"),
            Column("target", "On what"),
        ],
        log,
        totals=False,
    )
    lead = "Who may sign in, and every change with who made it."
    return _listing(request, "Team", lead, members, more=[changes])


def _listing(
    request: Request,
    title: str,
    lead: str,
    table: Table,
    span: Any = None,
    links: dict[str, str] | None = None,
    more: list[Table] | None = None,
) -> Response:
    tables = [table, *(more or [])]
    return page(
        request, "listing.html", title=title, lead=lead, tables=tables, span=span, links=links or {}
    )


def _period(rule: LimitRule) -> str:
    if rule.unit is Unit.CONCURRENT:
        return "at once"
    return {60: "minute", 3600: "hour", 86400: "day"}.get(rule.period_s, f"{rule.period_s} s")


def _mode(rule: LimitRule) -> str:
    return "on trial" if rule.shadow else "in force"


ROUTES = [
    Route("/requests", requests),
    Route("/requests/{request_id}", one_request),
    Route("/adapters", adapters),
    Route("/limits", limit_rules),
    Route("/safety", safety),
    Route("/team", team),
]
