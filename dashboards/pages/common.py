"""Helpers shared by all pages: dependencies, authorisation, redirects and form handling."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from core.errors import BadRequest, Conflict, Forbidden
from core.tenants.access import Actor, scope_for
from core.tenants.scope import TenantScope
from dashboards.explorer import address
from dashboards.filters import choice
from dashboards.page_data import Rejected
from dashboards.tables import Table
from dashboards.viewer import DashboardDeps, Viewer

Fields = dict[str, str]
FormHandler = Callable[[Request, Fields], Response]
LONGEST_FIELD = 200_000


def deps_of(request: Request) -> DashboardDeps:
    deps: DashboardDeps = request.app.state.deps
    return deps


def viewer_of(request: Request, obj: str, act: str = "read") -> Viewer:
    """The signed-in viewer. Forbidden unless casbin allows the act."""
    viewer: Viewer = request.state.viewer
    if not deps_of(request).auth.may(viewer, obj, act):
        raise Forbidden(
            f"The role {viewer.role} does not permit {act} on {obj}.",
            next_step="Ask an owner or an admin of your organisation.",
        )
    return viewer


def operator_of(request: Request, obj: str, act: str = "read") -> Viewer:
    """For pages that span all tenants. Forbidden for every role of a tenant."""
    viewer: Viewer = request.state.viewer
    if not viewer.operator:
        raise Forbidden(
            "This page is for the operator only.", next_step="Sign in with the operator's token."
        )
    return viewer_of(request, obj, act)


def scope_of(viewer: Viewer, tenant_id: str) -> TenantScope:
    """The operator's scope of the given tenant; any other viewer's own scope."""
    if not viewer.operator:
        return viewer.scope
    return scope_for(Actor(viewer.scope.actor, viewer.role, None), tenant_id)


def wants_csv(request: Request) -> bool:
    return request.query_params.get("format") == "csv"


def base_of(request: Request) -> str:
    """The base of links that leave the page, such as those in mails."""
    own = str(request.base_url).removesuffix("/").removesuffix(root_of(request))
    return deps_of(request).public_url.rstrip("/") or own


def address_of(request: Request) -> str:
    return request.client.host if request.client else ""


def root_of(request: Request) -> str:
    return str(request.scope.get("root_path", ""))


def sorted_by(request: Request, table: Table, usual: str) -> Table:
    """The table in the order of `sort` in the URL (`-key` is descending; `-usual` without it), with links
    in its head that change the order. Page and CSV have the same rows in the same order."""
    keys = [column.key for column in table.columns if column.kind != "acts"]
    wanted = choice(request, "sort", (*keys, *(f"-{key}" for key in keys)), f"-{usual}")
    key, falling = wanted.removeprefix("-"), wanted.startswith("-")
    rows = sorted(table.rows, key=lambda row: (row[key] is not None, row[key]), reverse=falling)
    links = {}
    for column in table.columns:
        first = f"-{column.key}" if column.is_number else column.key
        other = column.key if wanted == f"-{column.key}" else f"-{column.key}"
        target = other if column.key == key else first
        state = ("descending" if falling else "ascending") if column.key == key else "none"
        links[column.key] = (address(request, sort=target), state)
    return replace(table, rows=rows, sort=links)


def redirect_with_notice(request: Request, path: str, notice: str) -> Response:
    """Redirect to a GET after a change, so that a reload does not send the form again."""
    return RedirectResponse(f"{root_of(request)}{path}?notice={notice}", 303)


def form_handler(
    view: Callable[[Request], Response], /, **acts: FormHandler
) -> Callable[[Request], Awaitable[Response]]:
    """A POST handler for all changes of a page, dispatched by the form's field `act`. A form that is
    refused is shown again by `view`, with what was typed and the reason."""

    async def _change(request: Request) -> Response:
        async with request.form(max_fields=40, max_part_size=LONGEST_FIELD) as form:
            form_fields = {name: str(value).strip() for name, value in form.items()}
        act = acts.get(form_fields.get("act", ""))
        if act is None:
            raise BadRequest(
                f"Unknown action {form_fields.get('act', '')[:20]!r}.",
                next_step=f"Send one of {', '.join(acts)}.",
                param="act",
            )
        try:
            return await run_in_threadpool(act, request, form_fields)
        except (BadRequest, Conflict) as error:
            request.state.rejected = Rejected(form_fields, error)
            return await run_in_threadpool(view, request)

    return _change


def require_confirmation(form_fields: Fields, name: str) -> None:
    """BadRequest unless the user typed the name that a destructive act asks for."""
    if form_fields.get("confirm") != name:
        raise BadRequest(
            f"The confirmation {form_fields.get('confirm', '')[:80]!r} does not match the name.",
            next_step=f"Type {name!r} and send the form again.",
            param="confirm",
        )
