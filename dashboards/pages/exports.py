"""Exports: files of usage, charges, invoices and ledger, downloaded or written on a schedule."""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from billing.exports import schedules as schedules_of
from billing.exports.encoding import FOCUS, Export, chunks_of, column_names, export_of, format_of
from billing.exports.focus.tables import (
    BILLING_PERIOD,
    CONTRACT_COMMITMENT,
    COST_AND_USAGE,
    DEFAULT_VERSION,
    INVOICE_DETAIL,
    VERSIONS,
)
from billing.exports.formats import Format
from billing.exports.subjects import Period
from billing.exports.tables import ExportJob, ExportSchedule
from billing.exports.views import schedule_json
from core.tenants import audit
from core.tenants.scope import TenantScope
from dashboards.filters import choice, date_range
from dashboards.page_data import Form, Input, PageData, show
from dashboards.pages.common import (
    Fields,
    FormHandler,
    deps_of,
    form_handler,
    redirect_with_notice,
    require_confirmation,
    root_of,
    viewer_of,
)
from dashboards.tables import Column, Table
from dashboards.viewer import DashboardDeps, Viewer

PATH = "/exports"
WHAT = {
    "usage": "Usage: one row per request",
    "charges": "Charges: one row per request, by price component",
    "invoices": "Invoices with their lines",
    "ledger": "Ledger entries",
    "focus": "FOCUS, for FinOps tools",
}
VERSIONS_OF_FOCUS = {each: f"FOCUS {each}" for each in (DEFAULT_VERSION, *VERSIONS)}
DATASETS_OF_FOCUS = {
    COST_AND_USAGE: "Cost and Usage",
    INVOICE_DETAIL: "Invoice Detail",
    BILLING_PERIOD: "Billing Period",
    CONTRACT_COMMITMENT: "Contract Commitment",
}
FORMATS = {"csv": "CSV", "jsonl": "JSON Lines", "parquet": "Parquet"}
MAX_ROWS = 100
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
    viewer, deps = viewer_of(request, "exports"), deps_of(request)
    span = date_range(request, deps.clock.now(), deps.clock.now().day)
    tenant_id = viewer.scope.tenant_id
    can_edit = deps.auth.may(viewer, "exports", "write")
    with deps.database.read() as session:
        jobs = session.scalars(
            select(ExportJob)
            .where(ExportJob.tenant_id == tenant_id)
            .order_by(ExportJob.created_at.desc())
            .limit(MAX_ROWS)
        ).all()
        schedules = schedules_of.open_schedules(session, tenant_id)
    form_fields = [_schedule(each, can_edit) for each in schedules]
    columns = [*SCHEDULES, Column("acts", "Change", "acts")] if can_edit else SCHEDULES
    ran = [_job(each, root_of(request)) for each in jobs]
    page_data = PageData(
        "Exports",
        "Files whose totals equal those of the pages, the API and the invoices.",
        forms=[
            _download(str(span.first), str(span.last)),
            *([_new_schedule(viewer)] if can_edit else []),
            *([_EVERYTHING] if deps.auth.may(viewer, "tenant", "write") else []),
        ],
        after=[
            Table(
                "Schedules",
                columns,
                form_fields,
                totals=False,
                empty=_NO_SCHEDULE,
                next_step=("#new-schedule", "Create a schedule") if can_edit else None,
            ),
            Table("Export runs", JOBS, ran, totals=False, empty=_NO_JOB),
        ],
        link=("/webhooks", "Get a webhook when a scheduled export is written"),
    )
    return show(request, page_data)


_NO_SCHEDULE = "No schedules. A schedule writes a file each day, week or month."
_NO_JOB = "None yet. Files that you download above are not listed here."


_EVERYTHING = Form(
    f"{PATH}/everything",
    "Download everything",
    title="All that is stored",
    method="get",
    about="A ZIP archive of every table, file and adapter of your organisation, without secrets.",
)


def everything(request: Request) -> Response:
    viewer, deps = viewer_of(request, "tenant", "write"), deps_of(request)
    return deps.backend.export_tenant(viewer.scope)


def _download(first: str, last: str) -> Form:
    inputs = [
        Input("what", "What", "select", "usage", list(WHAT.items())),
        *_focus_inputs(),
        Input(
            "columns", "Columns of FOCUS", required=False, hint="all, or names separated by commas"
        ),
        Input("form", "Format", "select", "csv", list(FORMATS.items())),
        Input("from", "From", "date", first),
        Input("to", "To (inclusive)", "date", last),
    ]
    return Form("/exports/file", "Download", inputs=inputs, title="Download a file", method="get")


def _focus_inputs(version: str = DEFAULT_VERSION, dataset: str = COST_AND_USAGE) -> list[Input]:
    return [
        Input(
            "focus_version",
            "FOCUS version",
            "select",
            version,
            list(VERSIONS_OF_FOCUS.items()),
        ),
        Input("dataset", "FOCUS dataset", "select", dataset, list(DATASETS_OF_FOCUS.items())),
    ]


def _chosen(what: str, fields: Mapping[str, str]) -> Export:
    """The forms show the choices of FOCUS for any export; they count for FOCUS alone."""
    if what != FOCUS:
        return export_of(what)
    columns = column_names(fields.get("columns", ""))
    return export_of(what, fields.get("focus_version", ""), fields.get("dataset", ""), columns)


def file(request: Request) -> Response:
    """Streams the file, so that memory use does not depend on its size."""
    viewer, deps = viewer_of(request, "exports"), deps_of(request)
    span = date_range(request, deps.clock.now(), deps.clock.now().day)
    what = choice(request, "what", tuple(WHAT), "usage")
    form = format_of(choice(request, "form", tuple(FORMATS), "csv"))
    export = _chosen(what, request.query_params)
    name = f"tollhouse-{export.stem}-{span.first}-{span.last}.{form.value}"
    return StreamingResponse(
        _rows(deps, viewer.scope, export, form, Period(span.start, span.end)),
        media_type=form.media_type,
        headers={"content-disposition": f'attachment; filename="{name}"'},
    )


def _rows(
    deps: DashboardDeps, scope: TenantScope, export: Export, form: Format, period: Period
) -> Iterator[bytes]:
    with deps.database.report(fresh=True) as session:
        yield from chunks_of(session, export, form, scope, period)


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


def _schedule(each: ExportSchedule, can_edit: bool) -> dict[str, Any]:
    name = f"{each.what}, {each.format}"
    table = schedules_of.export_of_options(each.what, each.options).table
    shown = name if table is None else f"{name}, {table.version} {table.dataset}"
    fields = {"schedule": each.id}
    turn = ("resume", "Resume") if each.paused_at else ("pause", "Pause")
    acts = [
        Form(PATH, turn[1], {"act": turn[0], **fields}),
        Form(PATH, "Delete", {"act": "end", **fields}, confirm=name, danger=True),
    ]
    if table is not None:
        chosen = _focus_inputs(table.version, table.dataset)
        acts.insert(1, Form(PATH, "Change", {"act": "change", **fields}, chosen))
    return {
        "what": shown,
        "every": each.every,
        "to": each.destination,
        "state": "paused" if each.paused_at else "active",
        "next": None if each.paused_at else each.next_at,
        "error": each.last_error,
        "acts": acts if can_edit else [],
    }


def _new_schedule(viewer: Viewer) -> Form:
    """Only the operator may give a full path, since files are written with the server's rights."""
    hint = "directory or s3://bucket/path" if viewer.operator else "a name for your folder"
    inputs = [
        Input("what", "What", "select", "focus", list(WHAT.items())),
        *_focus_inputs(),
        Input("form", "Format", "select", "parquet", list(FORMATS.items())),
        Input("every", "Every", "select", "month", [(each, each) for each in schedules_of.EVERY]),
        Input("delay_hours", "Hours after the period ends", "number", "2", hint="for late usage"),
        Input("destination", "To", value="books", hint=hint),
    ]
    about = "Your folder is inside the operator's export directory. The list below shows each file."
    return Form(
        PATH, "Create", {"act": "create"}, inputs, title="New schedule", panel=True, about=about
    )


def _create(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "exports", "write"), deps_of(request)
    make = schedules_of.schedule if viewer.operator else schedules_of.schedule_own
    delay = form_fields.get("delay_hours", "")
    with deps.database.transaction() as session:
        created = make(
            session,
            deps.clock,
            deps.backend.export_store,
            what=_chosen(form_fields.get("what", ""), form_fields),
            form=form_fields.get("form", ""),
            destination=form_fields.get("destination", ""),
            every=form_fields.get("every", ""),
            tenant_id=viewer.scope.tenant_id,
            delay_hours=int(delay) if (delay.isascii() and delay.isdecimal()) else -1,
        )
        shown = schedule_json(created)
        audit.record(
            session,
            viewer.scope,
            deps.clock,
            "export_schedule.create",
            created.id,
            before=None,
            after=shown,
        )
    return redirect_with_notice(request, PATH, "schedule-made")


def _changing(act: str) -> FormHandler:
    """A handler that pauses, resumes or ends a schedule of the tenant."""
    do = {"pause": schedules_of.pause, "resume": schedules_of.resume, "end": schedules_of.end}[act]

    def _change(request: Request, form_fields: Fields) -> Response:
        viewer, deps = viewer_of(request, "exports", "write"), deps_of(request)
        with deps.database.transaction() as session:
            found = schedules_of.find(
                session, form_fields.get("schedule", ""), viewer.scope.tenant_id
            )
            if act == "end":
                require_confirmation(form_fields, f"{found.what}, {found.format}")
            before = schedule_json(found)
            do(found, deps.clock.now())
            after = None if act == "end" else schedule_json(found)
            audit.record(
                session,
                viewer.scope,
                deps.clock,
                f"export_schedule.{act}",
                found.id,
                before=before,
                after=after,
            )
        return redirect_with_notice(request, PATH, f"schedule-{act}")

    return _change


def _change_table(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "exports", "write"), deps_of(request)
    export = _chosen(FOCUS, form_fields)
    with deps.database.transaction() as session:
        found = schedules_of.find(session, form_fields.get("schedule", ""), viewer.scope.tenant_id)
        before = schedule_json(found)
        schedules_of.change_table(found, export)
        audit.record(
            session,
            viewer.scope,
            deps.clock,
            "export_schedule.change",
            found.id,
            before=before,
            after=schedule_json(found),
        )
    return redirect_with_notice(request, PATH, "schedule-change")


_ACTS = {name: _changing(name) for name in ("pause", "resume", "end")}
ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(
        PATH,
        form_handler(page_of, create=_create, change=_change_table, **_ACTS),
        methods=["POST"],
    ),
    Route(f"{PATH}/file", file),
    Route(f"{PATH}/everything", everything),
]
