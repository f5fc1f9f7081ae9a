"""/admin/v1/policies and /admin/v1/decisions: a tenant's moderation policies and their decisions."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query
from fastapi.responses import StreamingResponse

from gateway.api.admin.access import Allowed, Visit
from gateway.moments import moment_of
from moderation import policies
from moderation.policy import Policy
from moderation.records import decisions, describe, every_decision, export_csv

router = APIRouter(prefix="/admin/v1", tags=["moderation"])
Reads = Annotated[Visit, Depends(Allowed("moderation", "read"))]
Writes = Annotated[Visit, Depends(Allowed("moderation", "write"))]
Document = Annotated[dict[str, Any], Body(description="A policy, in the form that `GET` returns.")]
Level = Annotated[str, Query(description="key, project or tenant.")]
Target = Annotated[str | None, Query(description="Id of the project or key.")]

Since = Annotated[str | None, Query(description="ISO 8601 time; UTC without an offset.")]


@router.get("/policies")
def list_policies(visit: Reads) -> dict[str, Any]:
    with visit.services.database.read() as session:
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
            for row in policies.history(session, visit.scope)
        ]
    return {"object": "list", "data": data}


@router.put("/policies")
def put_policy(
    document: Document, visit: Writes, level: Level = "tenant", target: Target = None
) -> dict[str, Any]:
    services = visit.services
    services.opinions.check(Policy.from_dict(document))
    with services.database.transaction() as session:
        made = policies.put(
            session, visit.scope, services.clock, document, level=level, target=target
        )
    services.policies.refresh()
    return {"version": made.version, "level": level, "target": target}


@router.delete("/policies")
def retire_policy(visit: Writes, level: Level = "tenant", target: Target = None) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        policies.retire(session, visit.scope, services.clock, level=level, target=target)
    services.policies.refresh()
    return {"level": level, "target": target}


@router.get("/decisions")
def list_decisions(
    visit: Reads,
    since: Since = None,
    action: Annotated[str | None, Query(description="allow, annotate, redact or block.")] = None,
    acted: Annotated[bool, Query(description="Only decisions other than allow.")] = False,
    before_id: int | None = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> dict[str, Any]:
    with visit.services.database.read() as session:
        found = decisions(
            session,
            visit.scope,
            since=_moment("since", since),
            action=action,
            acted=acted,
            before_id=before_id,
            limit=limit,
        )
        return {"object": "list", "data": [describe(row) for row in found]}


@router.get("/decisions/export")
def export_decisions(visit: Reads, since: Since = None, until: Since = None) -> StreamingResponse:
    """Every decision of a period as CSV; by default the last 31 days."""
    end = _moment("until", until) or visit.services.clock.now()
    start = _moment("since", since) or end - timedelta(days=31)

    def _lines() -> Iterator[str]:
        with visit.services.database.read() as session:
            yield from export_csv(every_decision(session, visit.scope, start, end))

    name = f"tollhouse-decisions-{start:%Y%m%d}-{end:%Y%m%d}.csv"
    return StreamingResponse(
        _lines(),
        media_type="text/csv",
        headers={"content-disposition": f'attachment; filename="{name}"'},
    )


def _moment(name: str, text: str | None) -> datetime | None:
    return moment_of(text, name) if text is not None else None
