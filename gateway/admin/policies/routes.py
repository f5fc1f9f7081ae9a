"""/admin/v1/policies and /admin/v1/decisions: a tenant's moderation policies and their decisions."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session

from core.tenants import access
from core.tenants.access import Actor
from core.tenants.roles import Roles
from core.tenants.scope import TenantScope
from gateway.admin.access import AdminContext, OperatorContext, RequireOperator, RequirePermission
from gateway.admin.schemas import NewAppeal, Ruling
from gateway.edge.decoding import parse_datetime
from gateway.serving.api.dependencies import OpinionsDep, PoliciesDep, RolesDep
from moderation import appeals, policies, strikes
from moderation.policy import Policy
from moderation.records import decisions, describe, every_decision, export_csv

router = APIRouter(prefix="/admin/v1", tags=["moderation"])
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("moderation", "read"))]
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("moderation", "write"))]
Document = Annotated[dict[str, Any], Body(description="A policy, in the form that `GET` returns.")]
Level = Annotated[str, Query(description="key, project or tenant.")]
Target = Annotated[str | None, Query(description="Id of the project or key.")]

Since = Annotated[str | None, Query(description="ISO 8601 time; UTC without an offset.")]


@router.get("/policies")
def list_policies(ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        data = [
            {
                "version": row.version,
                "level": row.level,
                "target": row.target,
                "document": row.document,
                "created_at": row.created_at.isoformat(),
                "created_by": row.created_by,
                "retired_at": row.retired_at.isoformat() if row.retired_at else None,
            }
            for row in policies.history(session, ctx.scope)
        ]
    return {"object": "list", "data": data}


@router.put("/policies")
def put_policy(
    document: Document,
    ctx: WriteAccess,
    view: PoliciesDep,
    opinions: OpinionsDep,
    level: Level = "tenant",
    target: Target = None,
) -> dict[str, Any]:
    opinions.check(Policy.from_dict(document))
    with ctx.database.transaction() as session:
        saved = policies.put(session, ctx.scope, ctx.clock, document, level=level, target=target)
    view.refresh()
    return {"version": saved.version, "level": level, "target": target}


@router.delete("/policies")
def retire_policy(
    ctx: WriteAccess, view: PoliciesDep, level: Level = "tenant", target: Target = None
) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        policies.retire(session, ctx.scope, ctx.clock, level=level, target=target)
    view.refresh()
    return {"level": level, "target": target}


@router.get("/decisions")
def list_decisions(
    ctx: ReadAccess,
    since: Since = None,
    action: Annotated[str | None, Query(description="allow, annotate, redact or block.")] = None,
    acted: Annotated[bool, Query(description="Only decisions other than allow.")] = False,
    before_id: int | None = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = decisions(
            session,
            ctx.scope,
            since=_parse_time("since", since),
            action=action,
            acted=acted,
            before_id=before_id,
            limit=limit,
        )
        return {"object": "list", "data": [describe(row) for row in rows]}


@router.get("/decisions/export")
def export_decisions(
    ctx: ReadAccess, since: Since = None, until: Since = None
) -> StreamingResponse:
    """Every decision of a period as CSV; by default the last 31 days."""
    end = _parse_time("until", until) or ctx.clock.now()
    start = _parse_time("since", since) or end - timedelta(days=31)

    def _lines() -> Iterator[str]:
        with ctx.database.read() as session:
            yield from export_csv(every_decision(session, ctx.scope, start, end))

    name = f"tollhouse-decisions-{start:%Y%m%d}-{end:%Y%m%d}.csv"
    return StreamingResponse(
        _lines(),
        media_type="text/csv",
        headers={"content-disposition": f'attachment; filename="{name}"'},
    )


def _parse_time(name: str, text: str | None) -> datetime | None:
    return parse_datetime(text, name) if text is not None else None


ReviewAccess = Annotated[OperatorContext, Depends(RequireOperator("operations", "write"))]
Status = Annotated[str | None, Query(description="open, granted or denied; default: all.")]


@router.get("/appeals")
def list_appeals(ctx: ReadAccess, status: Status = None) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = appeals.appeals(session, ctx.scope, status)
        return {"object": "list", "data": [appeals.describe(each) for each in rows]}


@router.post("/appeals", status_code=201)
def open_appeal(body: NewAppeal, ctx: WriteAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        appeal = appeals.open_appeal(
            session, ctx.scope, ctx.clock, body.request_id, body.reason, body.direction
        )
        return appeals.describe(appeal)


@router.post("/appeals/{appeal_id}/ruling")
def rule_on_appeal(
    appeal_id: str, body: Ruling, ctx: ReviewAccess, roles: RolesDep
) -> dict[str, Any]:
    """Only the operator decides, so no tenant rules on its own case. Granting voids the strike."""
    with ctx.database.transaction() as session:
        scope = _reviewer(session, roles, ctx.actor, appeals.tenant_of(session, appeal_id))
        appeal = appeals.decide(
            session, scope, ctx.clock, appeal_id, grant=body.grant, answer=body.answer
        )
        return appeals.describe(appeal)


@router.get("/suspensions")
def list_suspensions(ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = strikes.suspensions(session, ctx.scope)
        return {"object": "list", "data": [strikes.describe(each) for each in rows]}


@router.delete("/suspensions/{key_id}")
def lift_suspension(key_id: str, ctx: ReviewAccess, roles: RolesDep) -> dict[str, Any]:
    """Lift the suspension. Earlier strikes no longer count."""
    with ctx.database.transaction() as session:
        scope = _reviewer(session, roles, ctx.actor, strikes.tenant_of(session, key_id))
        strikes.lift(session, scope, ctx.clock, key_id)
    return {"key_id": key_id, "suspended": False}


def _reviewer(session: Session, roles: Roles, actor: Actor, tenant_id: str) -> TenantScope:
    return access.authorise(session, roles, actor, tenant_id, "moderation", "write")
