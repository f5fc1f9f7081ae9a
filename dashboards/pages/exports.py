"""Exports: files of usage, charges, invoices and ledger, downloaded or written on a schedule."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from billing.exports import schedules as schedules_of
from billing.exports.documents import schedule_json
from billing.exports.formats import Format
from billing.exports.subjects import Period
from billing.exports.writing import chunks_of
from billing.models import ExportJob, ExportSchedule
from core.tenants import audit
from core.tenants.scope import TenantScope
from dashboards.filters import choice, date_range
from dashboards.pages.common import (
    Act,
    Fields,
    acting,
    back_to,
    confirmed,
    house_of,
    root_of,
    viewer_of,
)
from dashboards.sheets import Form, Input, Sheet, show
from dashboards.tables import Column, Table
from dashboards.viewer import House, Viewer

PATH = "/exports"
WHAT = {
    "usage": "Usage: one row per request",
    "charges": "Charges: one row per request, by price component",
    "invoices": "Invoices with their lines",
    "ledger": "Ledger entries",
    "focus": "FOCUS 1.2, for FinOps tools",
}
FORMATS = {"csv": "CSV", "jsonl": "JSON Lines", "parquet": "Parquet"}
MOST_ROWS = 100
JOBS = [
    Column("at", "Created", "moment"),
    Column("what", "What", link="href"),
    Column("span", "Days"),
    Column("to", "Destination"),
    Column("status", "State", "badge"),
    Column("rows", "Rows", "whole"),
    Column("bytes", "Bytes", "whole"),
    Column("sha256", "SHA-256, first 12", "code"),
    Column("error", "Error"),
]
SCHEDULES = [
    Column("what", "What"),
    Column("every", "Every"),
    Column("to", "Destination"),
    Column("state", "State", "badge"),
    Column("next", "Next", "moment"),
    Column("error", "Last error"),
]


def page_of(request: Request) -> Response:
    viewer, house = viewer_of(request, "exports"), house_of(request)
    span = date_range(request, house.clock.now(), house.clock.now().day)
    tenant_id = viewer.scope.tenant_id
    may_change = house.doorman.may(viewer, "exports", "write")
    with house.database.read() as session:
        jobs = session.scalars(
            select(ExportJob)
            .where(ExportJob.tenant_id == tenant_id)
            .order_by(ExportJob.created_at.desc())
            .limit(MOST_ROWS)
        ).all()
        schedules = schedules_of.open_ones(session, tenant_id)
    given = [_schedule(each, may_change) for each in schedules]
    columns = [*SCHEDULES, Column("acts", "Change", "acts")] if may_change else SCHEDULES
    ran = [_job(each, root_of(request)) for each in jobs]
    sheet = Sheet(
        "Exports",
        "Files whose totals equal those of the pages, the API and the invoices.",
        forms=[
            _download(str(span.first), str(span.last)),
            *([_new_schedule(viewer)] if may_change else []),
        ],
        after=[
            Table("Schedules", columns, given, totals=False, empty=_NO_SCHEDULE),
            Table("Export runs", JOBS, ran, totals=False, empty=_NO_JOB),
        ],
        link=("/webhooks", "Get a webhook when a scheduled export is written"),
    )
    return show(request, sheet)


_NO_SCHEDULE = "No schedules. Create one above to write a file each day, week or month."
_NO_JOB = "None yet. Files that you download above are not listed here."


def _download(first: str, last: str) -> Form:
    inputs = [
        Input("what", "What", "select", "usage", list(WHAT.items())),
        Input("form", "Format", "select", "csv", list(FORMATS.items())),
        Input("from", "From", "date", first),
        Input("to", "To (inclusive)", "date", last),
    ]
    return Form("/exports/file", "Download", inputs=inputs, title="Download a file", method="get")


def file(request: Request) -> Response:
    """Streams the file, so that memory use does not depend on its size."""
    viewer, house = viewer_of(request, "exports"), house_of(request)
    span = date_range(request, house.clock.now(), house.clock.now().day)
    what = choice(request, "what", tuple(WHAT), "usage")
    form = Format(choice(request, "form", tuple(FORMATS), "csv"))
    name = f"tollhouse-{what}-{span.first}-{span.last}.{form.value}"
    return StreamingResponse(
        _rows(house, viewer.scope, what, form, Period(span.start, span.end)),
        media_type=form.media_type,
        headers={"content-disposition": f'attachment; filename="{name}"'},
    )


def _rows(
    house: House, scope: TenantScope, what: str, form: Format, period: Period
) -> Iterator[bytes]:
    with house.database.read() as session:
        yield from chunks_of(session, what, form, scope, period)


def _job(each: ExportJob, root: str) -> dict[str, Any]:
    last = each.ends_at - timedelta(days=1)
    days = f"from={each.starts_at:%Y-%m-%d}&to={last:%Y-%m-%d}"
    return {
        "at": each.created_at,
        "what": f"{each.what}, {each.format}",
        "href": f"{root}{PATH}/file?what={each.what}&form={each.format}&{days}",
        "span": f"{each.starts_at:%Y-%m-%d} to {last:%Y-%m-%d}",
        "to": each.destination,
        "status": each.status,
        "rows": each.rows,
        "bytes": each.bytes,
        "sha256": (each.sha256 or "")[:12],
        "error": each.error,
    }


def _schedule(each: ExportSchedule, may_change: bool) -> dict[str, Any]:
    name = f"{each.what}, {each.format}"
    fields = {"schedule": each.id}
    turn = ("resume", "Resume") if each.paused_at else ("pause", "Pause")
    acts = [
        Form(PATH, turn[1], {"act": turn[0], **fields}),
        Form(PATH, "Delete", {"act": "end", **fields}, confirm=name, danger=True),
    ]
    return {
        "what": name,
        "every": each.every,
        "to": each.destination,
        "state": "paused" if each.paused_at else "active",
        "next": None if each.paused_at else each.next_at,
        "error": each.last_error,
        "acts": acts if may_change else [],
    }


def _new_schedule(viewer: Viewer) -> Form:
    """Only the operator may give a full path, since files are written with the server's rights."""
    hint = "directory or s3://bucket/path" if viewer.operator else "a name for your folder"
    inputs = [
        Input("what", "What", "select", "focus", list(WHAT.items())),
        Input("form", "Format", "select", "parquet", list(FORMATS.items())),
        Input("every", "Every", "select", "month", [(each, each) for each in schedules_of.EVERY]),
        Input("delay_hours", "Hours after the period ends", "number", "2", hint="for late usage"),
        Input("destination", "To", value="books", hint=hint),
    ]
    about = "Your folder is inside the operator's export directory. The list below shows each file."
    return Form(PATH, "Create", {"act": "create"}, inputs, title="New schedule", about=about)


def _create(request: Request, given: Fields) -> Response:
    viewer, house = viewer_of(request, "exports", "write"), house_of(request)
    make = schedules_of.schedule if viewer.operator else schedules_of.schedule_own
    delay = given.get("delay_hours", "")
    with house.database.transaction() as session:
        made = make(
            session,
            house.clock,
            house.gatehouse.export_store,
            what=given.get("what", ""),
            form=given.get("form", ""),
            destination=given.get("destination", ""),
            every=given.get("every", ""),
            tenant_id=viewer.scope.tenant_id,
            delay_hours=int(delay) if delay.isdigit() else -1,
        )
        shown = schedule_json(made)
        audit.record(
            session, viewer.scope, house.clock, "export_schedule.create", made.id, None, shown
        )
    return back_to(request, PATH, "schedule-made")


def _changing(act: str) -> Act:
    """A handler that pauses, resumes or ends a schedule of the tenant."""
    do = {"pause": schedules_of.pause, "resume": schedules_of.resume, "end": schedules_of.end}[act]

    def _change(request: Request, given: Fields) -> Response:
        viewer, house = viewer_of(request, "exports", "write"), house_of(request)
        with house.database.transaction() as session:
            found = schedules_of.find(session, given.get("schedule", ""), viewer.scope.tenant_id)
            if act == "end":
                confirmed(given, f"{found.what}, {found.format}")
            before = schedule_json(found)
            do(found, house.clock.now())
            after = None if act == "end" else schedule_json(found)
            audit.record(
                session,
                viewer.scope,
                house.clock,
                f"export_schedule.{act}",
                found.id,
                before,
                after,
            )
        return back_to(request, PATH, f"schedule-{act}")

    return _change


_ACTS = {name: _changing(name) for name in ("pause", "resume", "end")}
ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(PATH, acting(create=_create, **_ACTS), methods=["POST"]),
    Route(f"{PATH}/file", file),
]
