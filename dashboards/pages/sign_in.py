"""Sign-in and sign-out: by e-mail and password, by API key, or by the operator's token."""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from core.errors import RateLimited, Unauthenticated
from dashboards.render import page
from dashboards.viewer import DashboardDeps, SignedIn

COOKIE_AGE_S = 12 * 3600
COOKIE = "tollhouse_session"


async def form(request: Request) -> Response:
    if request.state.viewer is not None:
        return RedirectResponse(request.scope.get("root_path", "") + "/", 303)
    return page(request, "signin.html", problem="", sso=_deps(request).single_sign_on)


async def sign_in(request: Request) -> Response:
    from starlette.concurrency import run_in_threadpool

    async with request.form(max_fields=8, max_part_size=10_000) as fields:
        form_fields = {
            name: str(fields.get(name, "")).strip() for name in ("email", "password", "secret")
        }
    deps = _deps(request)
    address = request.client.host if request.client else ""

    def _sign_in() -> SignedIn:
        with deps.database.transaction() as session:
            return deps.auth.sign_in(session, address=address, **form_fields)

    try:
        created = await run_in_threadpool(_sign_in)
    except (Unauthenticated, RateLimited) as error:
        return page(
            request, "signin.html", error.status, problem=str(error), sso=deps.single_sign_on
        )
    answer = RedirectResponse(request.scope.get("root_path", "") + "/", 303)
    answer.set_cookie(
        COOKIE,
        created.cookie,
        max_age=COOKIE_AGE_S,
        path=request.scope.get("root_path", "") or "/",
        httponly=True,
        samesite="lax",
        secure=deps.secure_cookies,
    )
    return answer


def sign_out(request: Request) -> Response:
    deps = _deps(request)
    with deps.database.transaction() as session:
        deps.auth.sign_out(session, request.state.cookie)
    root = request.scope.get("root_path", "")
    answer = RedirectResponse(f"{root}/sign-in", 303)
    answer.delete_cookie(COOKIE, path=root or "/")
    return answer


def _deps(request: Request) -> DashboardDeps:
    deps: DashboardDeps = request.app.state.deps
    return deps


ROUTES = [
    Route("/sign-in", form, methods=["GET"]),
    Route("/sign-in", sign_in, methods=["POST"]),
    Route("/sign-out", sign_out, methods=["POST"]),
]
