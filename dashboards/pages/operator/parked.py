"""Usage events that could not be rated: why, and their release or dismissal."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.usage import usage
from core.tenants import audit, organisations
from dashboards.page_data import Form, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    operator_of,
    redirect_with_notice,
    require_confirmation,
    wants_csv,
)
from dashboards.tables import Column, Table

PATH = "/operator/parked"
_COLUMNS = [
    Column("at", "Parked", "moment"),
    Column("request", "Request", "code"),
    Column("tenant", "Tenant"),
    Column("model", "Model"),
    Column("reason", "Reason"),
    Column("acts", "Change", "acts"),
]
_SHOWN = 500


def page_of(request: Request) -> Response:
    operator_of(request, "operations")
    with deps_of(request).database.read() as session:
        found = usage.parked(session)
        names = {each.id: each.name for each in organisations.all_tenants(session)} if found else {}
    rows = [
        {
            "at": each.parked_at,
            "request": each.request_id,
            "tenant": names.get(tenant := each.payload.get("tenant_id", ""), tenant),
            "model": each.payload.get("model", ""),
            "reason": each.reason,
            "acts": [_drop_form(each.request_id)],
        }
        for each in found[:_SHOWN]
    ]
    table = Table(
        "Parked events, oldest first", _COLUMNS, rows, totals=False, empty="Nothing is parked."
    )
    if wants_csv(request):
        return table.csv("parked")
    release = Form(PATH, "Release all", act="release", title="Try again") if found else None
    page_data = PageData(
        "Parked usage",
        "Events that could not be stored or rated. Remove the reason, such as a missing price, then "
        "release them. Records that wait on a gateway's own disk: `tollhouse usage parked list` there.",
        tiles=[Tile("Parked", str(len(found)), state="warn" if found else "good")],
        actions=[release] if release else [],
        tables=[table],
    )
    return show(request, page_data)


def _drop_form(request_id: str) -> Form:
    return Form(
        PATH,
        "Close without billing",
        {"id": request_id},
        confirm=request_id[-6:],
        danger=True,
        act="drop",
    )


def _release(request: Request, _fields: Fields) -> Response:
    viewer, deps = operator_of(request, "money", "write"), deps_of(request)
    with deps.database.transaction() as session:
        released = usage.release(session, deps.clock)
        after = {"released": released, "parked": len(usage.parked(session))}
        audit.record_operator(
            session,
            deps.clock,
            viewer.scope.actor,
            "usage.release",
            "all",
            before=None,
            after=after,
        )
    return redirect_with_notice(request, PATH, "released")


def _drop(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "money", "write"), deps_of(request)
    request_id = form_fields.get("id", "")
    require_confirmation(form_fields, request_id[-6:])
    with deps.database.transaction() as session:
        usage.dismiss(session, request_id, viewer.scope.actor)
        audit.record_operator(
            session,
            deps.clock,
            viewer.scope.actor,
            "usage.dismiss",
            request_id,
            before=None,
            after={"dismissed": True},
        )
    return redirect_with_notice(request, PATH, "dropped")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(PATH, form_handler(page_of, release=_release, drop=_drop), methods=["POST"]),
]
