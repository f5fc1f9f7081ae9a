"""/admin/v1/policies and /admin/v1/decisions: a tenant's moderation policies and their decisions."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query
from fastapi.responses import StreamingResponse

from gateway.admin.access import AdminContext, RequirePermission
from gateway.edge.datetimes import parse_datetime
from gateway.serving.api.dependencies import OpinionsDep, PoliciesDep
from moderation import policies
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
