"""Projects: create and archive them, with their keys and their spend of this month."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.usage.day_range import Range
from core.labels import MOST_KEYS
from core.tenants import keys, organisations
from core.tenants.models import Project
from dashboards import usage_totals
from dashboards.page_data import Form, Input, PageData, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    redirect_with_notice,
    require_confirmation,
    viewer_of,
    wants_csv,
)
from dashboards.tables import Column, Table
from dashboards.usage_totals import UsageTotals

PATH = "/projects"
COLUMNS = [
    Column("project", "Project"),
    Column("id", "Id", "code"),
    Column("state", "State", "badge"),
    Column("labels", "Labels", about="Names by which usage and costs are counted."),
    Column("created", "Created", "moment"),
    Column("keys", "Keys", "whole", "Keys that are not revoked."),
    Column("requests", "Requests", "whole", "Rated requests of this month."),
]
_SPEND = Column("spend", "Spend", "money", "This month's charges, before tax and credits.")


def page_of(request: Request) -> Response:
    viewer, deps = viewer_of(request, "projects"), deps_of(request)
    can_edit = deps.auth.may(viewer, "projects", "write")
    now = deps.clock.now()
    month = Range.month_of(now, viewer.timezone)
    with deps.database.read() as session:
        found = organisations.projects(session, viewer.scope)
        live = [
            key.project_id for key in keys.all_of(session, viewer.scope) if keys.is_live(key, now)
        ]
        used = usage_totals.read(session, viewer.scope, month, now, "project_id")
    rows = [_row(each, live.count(each.id), used, can_edit) for each in found]
    spend = [_SPEND] if deps.auth.may(viewer, "costs", "read") else []
    acts = [Column("acts", "Change", "acts")] if can_edit else []
    table = Table(
        "Projects",
        [*COLUMNS, *spend, *acts],
        rows,
        viewer.currency,
        totals=False,
        empty="No projects yet. A key belongs to a project.",
        next_step=("#new-project", "Create a project") if can_edit else None,
    )
    if wants_csv(request):
        return table.csv("projects")
    page_data = PageData(
        "Projects",
        "Keys, limits, budgets and costs can be set and read by project.",
        tables=[table],
        forms=[_new()] if can_edit else [],
        link=("/keys", "Keys") if deps.auth.may(viewer, "keys", "read") else None,
    )
    return show(request, page_data)


def _row(project: Project, live: int, used: UsageTotals, can_edit: bool) -> dict[str, Any]:
    counts = used.counts.get(project.id, {})
    archived = project.archived_at is not None
    archive = Form(
        PATH,
        "Archive",
        {"act": "archive", "project": project.id},
        confirm=project.name,
        danger=True,
        about="Its keys stop working. Usage and invoices still show it.",
    )
    return {
        "project": project.name,
        "id": project.id,
        "state": "archived" if archived else "active",
        "labels": ", ".join(project.label_keys) or "–",
        "created": project.created_at,
        "keys": 0 if archived else live,
        "requests": counts.get("requests", 0),
        "spend": counts.get("amount", 0),
        "acts": [_labels_form(project), archive] if can_edit and not archived else [],
    }


def _labels_form(project: Project) -> Form:
    names = Input(
        "labels",
        "Labels",
        value=", ".join(project.label_keys),
        required=False,
        hint=f"up to {MOST_KEYS} names, such as team, feature",
    )
    return Form(
        PATH,
        "Set the labels",
        {"act": "labels", "project": project.id},
        [names],
        about="Requests name them in `metadata` or in the header `x-tollhouse-labels: team=search`.",
    )


def _new() -> Form:
    name = Input("name", "Name", hint="lower-case letters, digits, hyphens")
    return Form(PATH, "Create project", {"act": "create"}, [name], title="New project", panel=True)


def _create(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "projects", "write"), deps_of(request)
    with deps.database.transaction() as session:
        name = form_fields.get("name", "")
        organisations.create_project(session, viewer.scope, deps.clock, name=name)
    return redirect_with_notice(request, PATH, "project-made")


def _labels(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "projects", "write"), deps_of(request)
    given = [each.strip() for each in form_fields.get("labels", "").split(",") if each.strip()]
    project = form_fields.get("project", "")
    with deps.database.transaction() as session:
        organisations.set_label_keys(session, viewer.scope, deps.clock, project, given)
    return redirect_with_notice(request, PATH, "labels-set")


def _archive(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "projects", "write"), deps_of(request)
    with deps.database.transaction() as session:
        wanted = form_fields.get("project", "")
        project = organisations.get_project(session, viewer.scope, wanted)
        require_confirmation(form_fields, project.name)
        organisations.archive_project(session, viewer.scope, deps.clock, project.id)
    return redirect_with_notice(request, PATH, "project-archived")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(
        PATH,
        form_handler(page_of, create=_create, archive=_archive, labels=_labels),
        methods=["POST"],
    ),
]
