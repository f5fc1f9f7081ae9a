"""Upstreams: what the file of TOLLHOUSE_UPSTREAMS would change, and serving by it without a restart."""

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.errors import Conflict
from dashboards.page_data import Form, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    operator_of,
    redirect_with_notice,
    wants_csv,
)
from dashboards.scales import grouped
from dashboards.tables import Column, Table

PATH = "/operator/engines/upstreams"
_ENGINES = "/operator/engines"
_COLUMNS = [
    Column("upstream", "Upstream", "code"),
    Column("model", "Model"),
    Column("change", "Change", "badge"),
    Column("fields", "Fields", about="Values are not shown: some are secrets."),
]
_LEAD = (
    "The file of `TOLLHOUSE_UPSTREAMS` as it is now, compared with what this gateway serves. "
    "`tollhouse model reload` and `/admin/v1/engines/upstreams` do the same."
)


def page_of(request: Request) -> Response:
    viewer, deps = operator_of(request, "operations"), deps_of(request)
    back = (_ENGINES, "Engines")
    try:
        found = deps.backend.preview_upstreams()
    except Conflict as error:
        problem = f"{error.message} {error.next_step}".strip()
        return show(request, PageData("Upstreams", _LEAD, back=back, problem=problem))
    table = Table(
        "Changes",
        _COLUMNS,
        [asdict(each) for each in found.changes],
        totals=False,
        empty="The file is what the gateway serves by. Change it, then open this page again.",
        next_step=(PATH, "Read the file again"),
    )
    if wants_csv(request):
        return table.csv("upstreams")
    may_write = deps.auth.may(viewer, "operations", "write")
    serve = Form(
        PATH,
        "Serve by the file",
        {"act": "reload", "digest": found.digest},
        title="Reload",
        about="Every gateway process follows within seconds. Requests on removed engines finish there.",
    )
    page_data = PageData(
        "Upstreams",
        _LEAD,
        back=back,
        tiles=[
            Tile("Changes", grouped(len(found.changes)), found.file),
            Tile("Models", grouped(len(found.models)), ", ".join(found.models)),
            Tile("Digest", found.digest[:8], about="Of the list, in the audit log after a reload."),
        ],
        tables=[table],
        forms=[serve] if may_write and found.changes else [],
    )
    return show(request, page_data)


def _reload(request: Request, form_fields: Fields) -> Response:
    viewer = operator_of(request, "operations", "write")
    deps_of(request).backend.reload_upstreams(viewer.scope.actor, form_fields.get("digest", ""))
    return redirect_with_notice(request, _ENGINES, "upstreams-reloaded")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(PATH, form_handler(page_of, reload=_reload), methods=["POST"]),
]
