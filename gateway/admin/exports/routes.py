"""/admin/v1/export-schedules: exports that run on a schedule."""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from billing.exports import schedules
from billing.exports.encoding import FOCUS, export_of
from billing.exports.tables import ExportSchedule
from billing.exports.views import schedule_json
from billing.stores import Store, open_store
from core.errors import BadRequest
from core.tenants import audit
from gateway.admin.access import AdminContext, RequirePermission
from gateway.admin.billing.schemas import ExportScheduleChange, NewExportSchedule
from gateway.serving.api.dependencies import SettingsDep

router = APIRouter(prefix="/admin/v1", tags=["exports"])
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("exports", "read"))]
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("exports", "write"))]


@router.get("/export-schedules")
def list_schedules(ctx: ReadAccess) -> dict[str, Any]:
    """The tenant's schedules, including paused ones and those that the operator created for it."""
    with ctx.database.read() as session:
        rows = schedules.open_schedules(session, ctx.scope.tenant_id)
        return {"object": "list", "data": [schedule_json(each) for each in rows]}


@router.post("/export-schedules", status_code=201)
def create_schedule(
    body: NewExportSchedule, ctx: WriteAccess, settings: SettingsDep
) -> dict[str, Any]:
    """Export each day, week or month, starting with the current one. The destination is checked first.
    A tenant may only name a folder of its own; the operator may name any directory or bucket.
    """

    def _store_of(destination: str) -> Store:
        return open_store(destination, settings)

    create: Callable[..., ExportSchedule] = schedules.schedule_own
    if ctx.actor.is_operator:
        create = schedules.schedule
    with ctx.database.transaction() as session:
        created = create(
            session,
            ctx.clock,
            _store_of,
            tenant_id=ctx.scope.tenant_id,
            what=export_of(body.what, body.focus_version, body.dataset, body.columns),
            form=body.format,
            destination=body.destination,
            every=body.every,
            delay_hours=body.delay_hours,
        )
        shown = schedule_json(created)
        audit.record(
            session,
            ctx.scope,
            ctx.clock,
            "export_schedule.create",
            shown["id"],
            before=None,
            after=shown,
        )
    return shown


@router.patch("/export-schedules/{schedule_id}")
def change_schedule(
    schedule_id: str, body: ExportScheduleChange, ctx: WriteAccess
) -> dict[str, Any]:
    """Pause or resume a schedule, or change its FOCUS version, dataset and columns. Exports that fall
    due while it is paused are skipped."""
    if body.focus_version is not None:
        export = export_of(FOCUS, body.focus_version, body.dataset, body.columns)
        changed = _changed(
            ctx, schedule_id, "change", lambda row, now: schedules.change_table(row, export)
        )
        if body.paused is None:
            return changed
    if body.paused is None:
        raise BadRequest("Nothing is changed.", next_step="Give paused or focus_version.")
    if body.paused:
        return _changed(ctx, schedule_id, "pause", schedules.pause)
    return _changed(ctx, schedule_id, "resume", schedules.resume)


@router.delete("/export-schedules/{schedule_id}")
def end_schedule(schedule_id: str, ctx: WriteAccess) -> dict[str, Any]:
    """End a schedule. Its files stay, and its pending jobs still run."""
    return _changed(ctx, schedule_id, "end", schedules.end)


def _changed(
    ctx: AdminContext,
    schedule_id: str,
    name: str,
    change: Callable[[ExportSchedule, datetime], None],
) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        row = schedules.find(session, schedule_id, ctx.scope.tenant_id)
        before = schedule_json(row)
        change(row, ctx.clock.now())
        after = schedule_json(row)
        audit.record(
            session,
            ctx.scope,
            ctx.clock,
            f"export_schedule.{name}",
            row.id,
            before=before,
            after=None if row.ended_at else after,
        )
    return after
