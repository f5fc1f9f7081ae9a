"""Sign-in and sign-out: by e-mail and password, by API key, or by the operator's token."""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from core.errors import RateLimited, Unauthenticated
from dashboards.render import page
from dashboards.viewer import House, SignedIn

COOKIE_AGE_S = 12 * 3600
COOKIE = "tollhouse_session"


async def form(request: Request) -> Response:
    if request.state.viewer is not None:
        return RedirectResponse(request.scope.get("root_path", "") + "/", 303)
    return page(request, "signin.html", problem="", sso=_house(request).single_sign_on)


async def sign_in(request: Request) -> Response:
    from starlette.concurrency import run_in_threadpool

    async with request.form(max_fields=8, max_part_size=10_000) as fields:
        given = {
            name: str(fields.get(name, "")).strip() for name in ("email", "password", "secret")
        }
    house = _house(request)
    address = request.client.host if request.client else ""

    def _sign_in() -> SignedIn:
        with house.database.transaction() as session:
            return house.doorman.sign_in(session, address=address, **given)

    try:
        made = await run_in_threadpool(_sign_in)
    except (Unauthenticated, RateLimited) as error:
        return page(
            request, "signin.html", error.status, problem=str(error), sso=house.single_sign_on
        )
    answer = RedirectResponse(request.scope.get("root_path", "") + "/", 303)
    answer.set_cookie(
        COOKIE,
        made.cookie,
        max_age=COOKIE_AGE_S,
        path=request.scope.get("root_path", "") or "/",
        httponly=True,
        samesite="lax",
        secure=house.secure_cookies,
    )
    return answer


def sign_out(request: Request) -> Response:
    house = _house(request)
    with house.database.transaction() as session:
        house.doorman.sign_out(session, request.state.cookie)
    root = request.scope.get("root_path", "")
    answer = RedirectResponse(f"{root}/sign-in", 303)
    answer.delete_cookie(COOKIE, path=root or "/")
    return answer


def _house(request: Request) -> House:
    house: House = request.app.state.house
    return house


ROUTES = [
    Route("/sign-in", form, methods=["GET"]),
    Route("/sign-in", sign_in, methods=["POST"]),
    Route("/sign-out", sign_out, methods=["POST"]),
]
