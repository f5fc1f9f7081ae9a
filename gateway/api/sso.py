"""/dashboard/sso: the OpenID Connect sign-in, which ends in a dashboard session."""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse

from core.errors import NotFound, Unauthenticated
from core.tenants import members
from dashboards.viewer import SignedIn
from gateway.api.access import House
from gateway.auth.doorman import Doorman
from gateway.auth.single_sign_on import TRIP_S, Identity, SingleSignOn
from gateway.wiring import Services

router = APIRouter(prefix="/dashboard/sso", include_in_schema=False)
_TRIP, _SESSION, _HOME = "tollhouse_sso", "tollhouse_session", "/dashboard"


@router.get("/start")
async def start(request: Request, services: House) -> RedirectResponse:
    sso = _sso_of(services)
    trip = await asyncio.to_thread(sso.begin, _return_address(request, services))
    answer = RedirectResponse(trip.url, 303)
    answer.set_cookie(
        _TRIP,
        trip.cookie,
        max_age=TRIP_S,
        path=f"{_HOME}/sso",
        httponly=True,
        samesite="lax",  # the browser must send it with the issuer's redirect
        secure=_secure(services),
    )
    return answer


@router.get("/callback")
async def callback(
    request: Request, services: House, state: str = "", code: str = "", error: str = ""
) -> RedirectResponse:
    attempts = services.pipeline.auth.attempts
    address = request.client.host if request.client else ""
    attempts.check(address)
    try:
        if error or not code:
            raise Unauthenticated("The issuer refused the sign-in.", next_step="Try again.")
        cookie = request.cookies.get(_TRIP, "")
        back = _return_address(request, services)
        identity = await asyncio.to_thread(_sso_of(services).finish, back, state, code, cookie)
        made = await asyncio.to_thread(_sign_in, services, identity)
    except Unauthenticated:
        await attempts.failed(address)
        raise
    answer = RedirectResponse(f"{_HOME}/", 303)
    answer.delete_cookie(_TRIP, path=f"{_HOME}/sso")
    answer.set_cookie(
        _SESSION,
        made.cookie,
        max_age=12 * 3600,
        path=_HOME,
        httponly=True,
        samesite="lax",
        secure=_secure(services),
    )
    return answer


def _sign_in(services: Services, identity: Identity) -> SignedIn:
    doorman = Doorman(
        services.roles, services.pipeline.auth.attempts, services.clock, services.operator_token
    )
    with services.database.transaction() as session:
        member = members.by_subject(session, services.clock, identity.subject, identity.email)
        return doorman.sign_in_member(session, member)


def _sso_of(services: Services) -> SingleSignOn:
    if services.single_sign_on is None:
        raise NotFound("Single sign-on is not configured.", next_step="Sign in with a password.")
    return services.single_sign_on


def _return_address(request: Request, services: Services) -> str:
    base = services.settings.public_url.rstrip("/") or str(request.base_url).rstrip("/")
    return f"{base}{_HOME}/sso/callback"


def _secure(services: Services) -> bool:
    return services.settings.public_url.startswith("https://")
