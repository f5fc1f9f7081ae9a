"""/admin/v1: organisations above organisations, and the usage of those below."""

from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from billing.adjustments import organisation_links
from billing.organisations import organisation_usage, organisations
from core.errors import BadRequest
from gateway.admin.access import AdminContext, OperatorContext, RequireOperator, RequirePermission
from gateway.admin.billing.routes import record, tenant_id_of
from gateway.admin.billing.schemas import NewParent

router = APIRouter(prefix="/admin/v1", tags=["tenants"])
ReadAccess = Annotated[OperatorContext, Depends(RequireOperator("tenants", "read"))]
WriteAccess = Annotated[OperatorContext, Depends(RequireOperator("prices", "write"))]


@router.get("/organisations/usage")
def organisations_usage(
    ctx: Annotated[AdminContext, Depends(RequirePermission("costs", "read"))],
    first: Annotated[date | None, Query(alias="from", description="default: this month")] = None,
    last: Annotated[date | None, Query(alias="to", description="inclusive, UTC")] = None,
    by_model: bool = False,
) -> dict[str, Any]:
    """Usage of your organisation and of all below it, each from the day since which it is there."""
    last = last or ctx.clock.now().date()
    first = first or last.replace(day=1)
    if first > last:
        raise BadRequest(
            f"The range starts on {first}, after its end on {last}.",
            next_step="Swap the dates.",
            param="from",
        )
    end = _midnight(last) + timedelta(1)
    with ctx.database.read() as session:
        rows = organisation_usage.read(session, ctx.scope, _midnight(first), end, by_model=by_model)
    return {"object": "list", "data": organisation_usage.rollup_json(rows)}


@router.get("/organisation-links")
def list_links(ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        links = organisations.all_links(session).values()
        rows = [organisations.describe(session, each) for each in links]
    ordered = sorted(rows, key=lambda row: (row["parent"], row["tenant"]))
    return {"object": "list", "data": ordered}


@router.put("/tenants/{tenant}/parent")
def set_parent(tenant: str, body: NewParent, ctx: WriteAccess) -> dict[str, Any]:
    """Put a tenant below another, or change who pays and the mark-up."""
    with ctx.database.transaction() as session:
        child_id = tenant_id_of(session, tenant)
        draft = organisation_links.LinkDraft(
            child_id,
            tenant_id_of(session, body.parent),
            body.pays,
            body.markup_percent,
            ctx.actor.id,
        )
        link = organisation_links.set_parent(session, ctx.clock, draft)
        shown = organisations.describe(session, link)
        record(session, ctx, child_id, "organisation.link", shown["parent"], shown)
    return shown


@router.delete("/tenants/{tenant}/parent")
def remove_parent(tenant: str, ctx: WriteAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        child_id = tenant_id_of(session, tenant)
        shown = organisations.describe(session, organisation_links.remove_parent(session, child_id))
        record(session, ctx, child_id, "organisation.unlink", shown["parent"], {})
    return {**shown, "removed": True}


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)
