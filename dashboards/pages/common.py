"""What every page begins with: the viewer, the house, and the right to look."""

from collections.abc import Awaitable, Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from core.errors import BadRequest, Forbidden
from core.tenants.access import THE_OPERATOR, scope_for
from core.tenants.scope import TenantScope
from dashboards.viewer import House, Viewer

Fields = dict[str, str]
Act = Callable[[Request, Fields], Response]
LONGEST_FIELD = 200_000


def house_of(request: Request) -> House:
    house: House = request.app.state.house
    return house


def viewer_of(request: Request, obj: str, act: str = "read") -> Viewer:
    """The signed-in viewer, once casbin has allowed the act; Forbidden otherwise."""
    viewer: Viewer = request.state.viewer
    if not house_of(request).doorman.may(viewer, obj, act):
        raise Forbidden(
            f"The role {viewer.role} may not {act} {obj}.", next_step="Ask an owner or an admin."
        )
    return viewer


def operator_of(request: Request, obj: str, act: str = "read") -> Viewer:
    """For pages that span all tenants: no role of a tenant is enough, whatever its policy says."""
    viewer: Viewer = request.state.viewer
    if not viewer.operator:
        raise Forbidden("This page is the operator's.", next_step="Sign in with its token.")
    return viewer_of(request, obj, act)


def scope_of(viewer: Viewer, tenant_id: str) -> TenantScope:
    """The operator's scope of one tenant; NotFound for anybody else."""
    return scope_for(THE_OPERATOR, tenant_id) if viewer.operator else viewer.scope


def wants_csv(request: Request) -> bool:
    return request.query_params.get("format") == "csv"


def root_of(request: Request) -> str:
    return str(request.scope.get("root_path", ""))


def back_to(request: Request, path: str, notice: str) -> Response:
    """After a change: a fresh GET, so that a reload sends nothing twice."""
    return RedirectResponse(f"{root_of(request)}{path}?notice={notice}", 303)


def acting(**acts: Act) -> Callable[[Request], Awaitable[Response]]:
    """One address for all changes of a page; the form's field `act` says which."""

    async def _change(request: Request) -> Response:
        async with request.form(max_fields=40, max_part_size=LONGEST_FIELD) as form:
            given = {name: str(value).strip() for name, value in form.items()}
        act = acts.get(given.get("act", ""))
        if act is None:
            raise BadRequest(f"The form names no act: one of {', '.join(acts)}.", param="act")
        return await run_in_threadpool(act, request, given)

    return _change


def confirmed(given: Fields, name: str) -> None:
    """A destructive act asks for the name, and the server looks."""
    if given.get("confirm") != name:
        raise BadRequest(
            "The name that was typed is not the one.", next_step=f"Type {name!r} and send again."
        )
