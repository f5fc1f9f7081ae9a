"""Sign-in and sign-out: by e-mail and password, by API key, or by the operator's token."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from core.errors import RateLimited, Unauthenticated
from core.tenants import members
from dashboards.pages.common import address_of, deps_of, root_of
from dashboards.render import page
from dashboards.viewer import SignedIn, is_secure

COOKIE_AGE_S = 12 * 3600
COOKIE = "tollhouse_session"


async def form(request: Request) -> Response:
    if request.state.viewer is not None:
        return RedirectResponse(request.scope.get("root_path", "") + "/", 303)
    return _form(request)


async def sign_in(request: Request) -> Response:
    async with request.form(max_fields=8, max_part_size=10_000) as fields:
        email, password, secret = (
            str(fields.get(name, "")).strip() for name in ("email", "password", "secret")
        )
    deps, address = deps_of(request), address_of(request)

    def _sign_in() -> SignedIn:
        proof = None if secret else members.check_password(deps.database, email, password)
        with deps.database.transaction() as session:
            return deps.auth.sign_in(session, proof=proof, secret=secret, address=address)

    try:
        async with deps.auth.attempt(address):
            created = await run_in_threadpool(_sign_in)
    except (Unauthenticated, RateLimited) as error:
        return _form(request, error.status, str(error))
    return with_session(request, created)


def _form(request: Request, status: int = 200, problem: str = "") -> Response:
    deps = deps_of(request)
    return page(
        request,
        "signin.html",
        status,
        problem=problem,
        sso=deps.single_sign_on,
        resets=deps.alert_targets.sends_mail,
    )


def with_session(request: Request, created: SignedIn) -> Response:
    """To the first page, with the cookie of the session."""
    root = root_of(request)
    answer = RedirectResponse(f"{root}/", 303)
    answer.set_cookie(
        COOKIE,
        created.cookie,
        max_age=COOKIE_AGE_S,
        path=root or "/",
        httponly=True,
        samesite="lax",
        secure=is_secure(request),
    )
    return answer


def sign_out(request: Request) -> Response:
    deps = deps_of(request)
    with deps.database.transaction() as session:
        deps.auth.sign_out(session, request.state.cookie)
    root = request.scope.get("root_path", "")
    answer = RedirectResponse(f"{root}/sign-in", 303)
    answer.delete_cookie(COOKIE, path=root or "/")
    return answer


ROUTES = [
    Route("/sign-in", form, methods=["GET"]),
    Route("/sign-in", sign_in, methods=["POST"]),
    Route("/sign-out", sign_out, methods=["POST"]),
]
