"""/dashboard/sso: the OpenID Connect sign-in, which ends in a dashboard session."""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse

from core.errors import BadRequest, NotFound, Unauthenticated
from core.tenants import sign_on
from core.tenants.sign_on import ExternalIdentity
from dashboards.viewer import SignedIn
from gateway.api.access import ServicesDep
from gateway.auth.dashboard_auth import DashboardAuth
from gateway.auth.single_sign_on import SIGN_IN_TIMEOUT_S, SingleSignOn
from gateway.wiring import Services

router = APIRouter(prefix="/dashboard/sso", include_in_schema=False)
_FLOW_COOKIE, _SESSION_COOKIE, _HOME = "tollhouse_sso", "tollhouse_session", "/dashboard"


@router.get("/start")
async def start(
    request: Request, services: ServicesDep, invitation: str = "", tenant: str = ""
) -> RedirectResponse:
    """`invitation` links the account to the invited member; `tenant` chooses a membership."""
    sso = _sso_of(services)
    if max(len(invitation), len(tenant)) > 100:  # they travel in a cookie
        raise BadRequest("The invitation or the tenant is too long.", next_step="Copy the link.")
    flow = await asyncio.to_thread(sso.begin, _redirect_uri(request, services), invitation, tenant)
    answer = RedirectResponse(flow.url, 303)
    answer.set_cookie(
        _FLOW_COOKIE,
        flow.cookie,
        max_age=SIGN_IN_TIMEOUT_S,
        path=f"{_HOME}/sso",
        httponly=True,
        samesite="lax",  # the browser must send it with the issuer's redirect
        secure=_secure(services),
    )
    return answer


@router.get("/callback")
async def callback(
    request: Request, services: ServicesDep, state: str = "", code: str = "", error: str = ""
) -> RedirectResponse:
    attempts = services.pipeline.auth.attempts
    address = request.client.host if request.client else ""
    attempts.check(address)
    try:
        if error or not code:
            raise Unauthenticated("The issuer refused the sign-in.", next_step="Try again.")
        cookie = request.cookies.get(_FLOW_COOKIE, "")
        redirect_uri = _redirect_uri(request, services)
        identity = await asyncio.to_thread(
            _sso_of(services).finish, redirect_uri, state, code, cookie
        )
        signed_in = await asyncio.to_thread(_sign_in, services, identity)
    except Unauthenticated:
        await attempts.failed(address)
        raise
    answer = RedirectResponse(f"{_HOME}/", 303)
    answer.delete_cookie(_FLOW_COOKIE, path=f"{_HOME}/sso")
    answer.set_cookie(
        _SESSION_COOKIE,
        signed_in.cookie,
        max_age=12 * 3600,
        path=_HOME,
        httponly=True,
        samesite="lax",
        secure=_secure(services),
    )
    return answer


def _sign_in(services: Services, identity: ExternalIdentity) -> SignedIn:
    dashboard_auth = DashboardAuth(
        services.roles, services.pipeline.auth.attempts, services.clock, services.operator_token
    )
    with services.database.transaction() as session:
        member = sign_on.authenticate(session, services.clock, identity)
        return dashboard_auth.sign_in_member(session, member)


def _sso_of(services: Services) -> SingleSignOn:
    if services.single_sign_on is None:
        raise NotFound("Single sign-on is not configured.", next_step="Sign in with a password.")
    return services.single_sign_on


def _redirect_uri(request: Request, services: Services) -> str:
    base = services.settings.public_url.rstrip("/") or str(request.base_url).rstrip("/")
    return f"{base}{_HOME}/sso/callback"


def _secure(services: Services) -> bool:
    return services.settings.public_url.startswith("https://")
