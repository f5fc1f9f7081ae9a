"""/admin/v1/policies and /admin/v1/decisions: what the screen does for a tenant, and what it did."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query

from core.errors import BadRequest
from gateway.api.admin.access import Allowed, Visit
from moderation import policies
from moderation.records import decisions

router = APIRouter(prefix="/admin/v1", tags=["moderation"])
Reads = Annotated[Visit, Depends(Allowed("moderation", "read"))]
Writes = Annotated[Visit, Depends(Allowed("moderation", "write"))]
Document = Annotated[dict[str, Any], Body(description="A policy, as `GET` shows one.")]
Level = Annotated[str, Query(description="key, project or tenant.")]
Target = Annotated[str | None, Query(description="Id of the project or key.")]


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
    since: Annotated[str | None, Query(description="A moment with its zone.")] = None,
    before_id: int | None = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> dict[str, Any]:
    with visit.services.database.read() as session:
        found = decisions(
            session, visit.scope, since=_moment(since), before_id=before_id, limit=limit
        )
        data = [
            {
                "id": row.id,
                "request_id": row.request_id,
                "at": row.at.isoformat(),
                "direction": row.direction,
                "action": row.action,
                "policy_version": row.policy_version,
                "text_sha256": row.text_sha256,
                "categories": row.categories,
                "scores": row.scores,
                "spans": row.spans,
                "view": row.view,
                "unscanned": row.unscanned,
            }
            for row in found
        ]
    return {"object": "list", "data": data}


def _moment(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(f"since is {text[:40]!r}, not a moment.", param="since") from None
    if moment.tzinfo is None:
        raise BadRequest("since needs its zone: `2027-01-31T00:00:00Z`.", param="since")
    return moment
