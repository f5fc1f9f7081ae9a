"""The mounted dashboard application: authentication, security headers, and a same-origin check."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy.exc import DataError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from core.database import unstorable
from core.errors import Forbidden, TollhouseError
from core.tenant_slots import TenantSlots
from dashboards.pages.routes import ROUTES
from dashboards.render import HERE, page
from dashboards.viewer import DashboardDeps

COOKIE = "tollhouse_session"
_PAGES_OF_A_TENANT = 2  # that are made at the same time
OPEN_PATHS = ("/sign-in", "/invitation", "/reset", "/static/", "/sso/")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}

HSTS_S = 180 * 86_400

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


def create_dashboard(deps: DashboardDeps) -> Asgi:
    routes = [Mount("/static", StaticFiles(directory=HERE / "static")), *ROUTES]
    handlers: dict[Any, Any] = {
        TollhouseError: _error_page,
        HTTPException: _http_error_page,
        DataError: _data_error_page,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.deps = deps
    return _SessionMiddleware(app, deps)


class _SessionMiddleware:
    """Resolves the viewer, redirects to the sign-in page without one, and adds security headers."""

    def __init__(self, app: Starlette, deps: DashboardDeps) -> None:
        self._app = app
        self._deps = deps
        self._slots = TenantSlots(_PAGES_OF_A_TENANT)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"] = self._app  # the error page needs it before Starlette sets it
        request = Request(scope)
        path = request.url.path.removeprefix(scope.get("root_path", "")) or "/"

        def release() -> None:
            return

        async def _send(message: MutableMapping[str, Any]) -> None:
            release()
            if message["type"] == "http.response.start":
                static = path.startswith("/static/")
                extra = {**HEADERS, "cache-control": "max-age=3600"} if static else HEADERS
                if request.url.scheme == "https" or self._deps.secure_cookies:
                    extra = {**extra, "strict-transport-security": f"max-age={HSTS_S}"}
                raw = [(name.encode(), value.encode()) for name, value in extra.items()]
                names = {name for name, _ in raw}
                other_headers = [
                    pair for pair in message.get("headers", []) if pair[0].lower() not in names
                ]
                message["headers"] = [*other_headers, *raw]
            await send(message)

        answer = await self._authorise(request, path)
        viewer = getattr(request.state, "viewer", None)
        # A page of a tenant occupies at most its share of the threads, until its response begins.
        if viewer is not None and not viewer.operator:
            release = await self._slots.take(viewer.scope.tenant_id)
        try:
            await (answer or self._app)(scope, receive, _send)
        finally:
            release()

    async def _authorise(self, request: Request, path: str) -> Response | None:
        """None admits the request to its page."""
        root = request.scope.get("root_path", "")
        if request.method not in ("GET", "HEAD") and not same_origin(request):
            return _error_page(request, Forbidden("This form was sent from another site."))
        cookie = request.cookies.get(COOKIE, "")
        viewer = None
        if cookie:
            address = request.client.host if request.client else ""
            viewer = await run_in_threadpool(_find_viewer, self._deps, cookie, address)
        request.state.viewer = viewer
        request.state.cookie = cookie
        if viewer is None and not path.startswith(OPEN_PATHS):
            return RedirectResponse(f"{root}/sign-in", 303)
        return None


def _find_viewer(deps: DashboardDeps, cookie: str, address: str) -> Any:
    with deps.database.read() as session:
        return deps.auth.find(session, cookie, address)


def same_origin(request: Request) -> bool:
    """Whether the form was sent by one of our pages. Browsers send Origin with every POST, so a
    request without it does not come from a page."""
    fetch_site = request.headers.get("sec-fetch-site")
    if fetch_site is not None:
        return fetch_site in ("same-origin", "none")
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


def _error_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, TollhouseError)
    if not hasattr(request.state, "viewer"):
        request.state.viewer = None
    return page(
        request, "error.html", error.status, message=error.message, next_step=error.next_step
    )


def _data_error_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, DataError)
    return _error_page(request, unstorable(error))


def _http_error_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = "This page does not exist." if error.status_code == 404 else str(error.detail)
    return page(request, "error.html", error.status_code, message=message, next_step="")
