"""Safety queue: open appeals, and keys that the strike rule suspended."""

from typing import Any

from sqlalchemy import and_, select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.errors import NotFound
from core.tenants.models import ApiKey, Tenant
from dashboards.page_data import Form, Input, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    operator_of,
    redirect_with_notice,
    require_confirmation,
    scope_of,
    wants_csv,
)
from dashboards.scales import grouped
from dashboards.tables import Column, Table
from moderation import appeals, strikes
from moderation.models import Appeal, Decision, Suspension

PATH = "/operator/safety"
MAX_ROWS = 200
APPEALS = [
    Column("at", "Opened", "moment"),
    Column("tenant", "Tenant"),
    Column("request", "Request", "code"),
    Column("direction", "Direction"),
    Column("action", "Action", "badge"),
    Column("found", "Categories and scores", about="Classifier scores; no text is stored."),
    Column("reason", "Reason of the appeal"),
    Column("acts", "Decide", "acts"),
]
SUSPENDED = [
    Column("at", "Suspended", "moment"),
    Column("tenant", "Tenant"),
    Column("key", "Key"),
    Column("strikes", "Strikes", "whole", "Blocked requests within the window of the strike rule."),
    Column("acts", "Reinstate", "acts"),
]


def page_of(request: Request) -> Response:
    operator_of(request, "moderation")
    deps = deps_of(request)
    with deps.database.read() as session:
        waiting, suspended = _waiting(session), _suspended(session)
    table = Table("Appeals", APPEALS, waiting, totals=False, empty="No open appeals.")
    if wants_csv(request):
        return table.csv("appeals")
    page_data = PageData(
        "Safety queue",
        "A granted appeal removes the strike. A suspended key must be reinstated separately.",
        tiles=[
            Tile("Open appeals", grouped(len(waiting)), state="warn" if waiting else "good"),
            Tile("Suspended keys", grouped(len(suspended))),
        ],
        tables=[
            table,
            Table("Suspended keys", SUSPENDED, suspended, totals=False, empty="No suspended keys."),
        ],
    )
    return show(request, page_data)


def _waiting(session: Session) -> list[dict[str, Any]]:
    same = and_(Decision.request_id == Appeal.request_id, Decision.direction == Appeal.direction)
    rows = session.execute(
        select(Appeal, Decision, Tenant.name)
        .join(Decision, same, isouter=True)
        .join(Tenant, Tenant.id == Appeal.tenant_id, isouter=True)
        .where(Appeal.status == "open")
        .order_by(Appeal.opened_at)
        .limit(MAX_ROWS)
    )
    return [
        {
            "at": appeal.opened_at,
            "tenant": tenant or appeal.tenant_id,
            "request": appeal.request_id,
            "direction": appeal.direction,
            "action": decision.action if decision else None,
            "found": _found(decision),
            "reason": appeal.reason,
            "acts": [
                Form(
                    PATH,
                    words,
                    {"act": "decide", "appeal": appeal.id, "verdict": words},
                    [Input("answer", "Answer to the tenant", required=False)],
                )
                for words in ("Grant", "Deny")
            ],
        }
        for appeal, decision, tenant in rows
    ]


def _found(decision: Decision | None) -> str:
    if decision is None:
        return "the decision has been deleted after its retention period"
    return ", ".join(f"{name} {decision.scores.get(name, 0):.2f}" for name in decision.categories)


def _suspended(session: Session) -> list[dict[str, Any]]:
    rows = session.execute(
        select(Suspension, ApiKey.name, Tenant.name)
        .join(ApiKey, ApiKey.id == Suspension.key_id)
        .join(Tenant, Tenant.id == Suspension.tenant_id)
        .where(Suspension.lifted_at.is_(None))
        .order_by(Suspension.at.desc())
        .limit(MAX_ROWS)
    )
    return [
        {
            "at": each.at,
            "tenant": tenant,
            "key": key,
            "strikes": each.strikes,
            "acts": [
                Form(PATH, "Reinstate the key", {"act": "free", "id": str(each.id)}, confirm=key)
            ],
        }
        for each, key, tenant in rows
    ]


def _decide(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "moderation", "write"), deps_of(request)
    with deps.database.transaction() as session:
        appeal = session.get(Appeal, form_fields.get("appeal", ""))
        if appeal is None:
            raise NotFound("There is no such appeal.", next_step="Choose one from the list.")
        appeals.decide(
            session,
            scope_of(viewer, appeal.tenant_id),
            deps.clock,
            appeal.id,
            grant=form_fields.get("verdict") == "Grant",
            answer=form_fields.get("answer", ""),
        )
    return redirect_with_notice(request, PATH, "appeal-decided")


def _free(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "moderation", "write"), deps_of(request)
    number = form_fields.get("id", "")
    with deps.database.transaction() as session:
        found = (
            session.get(Suspension, int(number))
            if (number.isascii() and number.isdecimal() and len(number) < 19)
            else None
        )
        if found is None:
            raise NotFound("There is no such suspension.", next_step="Choose one from the list.")
        require_confirmation(form_fields, session.get_one(ApiKey, found.key_id).name)
        strikes.lift(session, scope_of(viewer, found.tenant_id), deps.clock, found.key_id)
    return redirect_with_notice(request, PATH, "key-freed")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(PATH, form_handler(page_of, decide=_decide, free=_free), methods=["POST"]),
]
