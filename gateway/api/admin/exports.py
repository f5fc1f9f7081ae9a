"""/admin/v1/export-schedules: exports that run on a schedule."""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from billing.exports import schedules
from billing.exports.documents import schedule_json
from billing.exports.stores import Store, open_store
from billing.models import ExportSchedule
from core.tenants import audit
from gateway.api.admin.access import Allowed, Visit
from gateway.schemas.billing import ExportScheduleChange, NewExportSchedule

router = APIRouter(prefix="/admin/v1", tags=["exports"])
Sees = Annotated[Visit, Depends(Allowed("exports", "read"))]
Changes = Annotated[Visit, Depends(Allowed("exports", "write"))]


@router.get("/export-schedules")
def list_schedules(visit: Sees) -> dict[str, Any]:
    """The tenant's schedules, including paused ones and those that the operator created for it."""
    with visit.services.database.read() as session:
        rows = schedules.open_ones(session, visit.scope.tenant_id)
        return {"object": "list", "data": [schedule_json(each) for each in rows]}


@router.post("/export-schedules", status_code=201)
def create_schedule(body: NewExportSchedule, visit: Changes) -> dict[str, Any]:
    """Export each day, week or month, starting with the current one. The destination is checked first.
    A tenant may only name a folder of its own; the operator may name any directory or bucket.
    """
    services = visit.services

    def _store_of(destination: str) -> Store:
        return open_store(destination, services.settings)

    make: Callable[..., ExportSchedule] = schedules.schedule_own
    if visit.actor.is_operator:
        make = schedules.schedule
    with services.database.transaction() as session:
        made = make(
            session,
            services.clock,
            _store_of,
            tenant_id=visit.scope.tenant_id,
            what=body.what,
            form=body.format,
            destination=body.destination,
            every=body.every,
            delay_hours=body.delay_hours,
        )
        shown = schedule_json(made)
        audit.record(
            session,
            visit.scope,
            services.clock,
            "export_schedule.create",
            shown["id"],
            None,
            shown,
        )
    return shown


@router.patch("/export-schedules/{schedule_id}")
def pause_or_resume(schedule_id: str, body: ExportScheduleChange, visit: Changes) -> dict[str, Any]:
    """Pause or resume a schedule. Exports that fall due while it is paused are skipped."""
    if body.paused:
        return _changed(visit, schedule_id, "pause", schedules.pause)
    return _changed(visit, schedule_id, "resume", schedules.resume)


@router.delete("/export-schedules/{schedule_id}")
def end_schedule(schedule_id: str, visit: Changes) -> dict[str, Any]:
    """End a schedule. Its files stay, and its pending jobs still run."""
    return _changed(visit, schedule_id, "end", schedules.end)


def _changed(
    visit: Visit, schedule_id: str, name: str, change: Callable[[ExportSchedule, datetime], None]
) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        found = schedules.find(session, schedule_id, visit.scope.tenant_id)
        before = schedule_json(found)
        change(found, services.clock.now())
        after = schedule_json(found)
        audit.record(
            session,
            visit.scope,
            services.clock,
            f"export_schedule.{name}",
            found.id,
            before,
            None if found.ended_at else after,
        )
    return after
