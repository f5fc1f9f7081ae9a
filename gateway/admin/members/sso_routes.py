"""/dashboard/sso: the OpenID Connect sign-in, which ends in a dashboard session."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import RedirectResponse

from core.errors import BadRequest, NotFound, Unauthenticated
from core.settings import Settings
from core.tenants import sign_on as members
from core.tenants.sign_on import ExternalIdentity
from dashboards.viewer import SignedIn
from gateway.edge.auth.single_sign_on import SIGN_IN_TIMEOUT_S, SingleSignOn
from gateway.edge.threads import Work, run_as
from gateway.serving.api.dependencies import (
    AuthDep,
    ClockDep,
    DashboardAuthDep,
    DatabaseDep,
    SettingsDep,
    SingleSignOnDep,
)

router = APIRouter(prefix="/dashboard/sso", include_in_schema=False)
_FLOW_COOKIE, _SESSION_COOKIE, _HOME = "tollhouse_sso", "tollhouse_session", "/dashboard"


@dataclass(frozen=True)
class _Sessions:
    """Begins the dashboard session of a member whom the issuer has authenticated."""

    database: DatabaseDep
    clock: ClockDep
    auth: DashboardAuthDep

    def begin(self, identity: ExternalIdentity) -> SignedIn:
        with self.database.transaction() as session:
            member = members.authenticate(session, self.clock, identity)
            return self.auth.sign_in_member(session, member)


@router.get("/start")
async def start(
    request: Request,
    sign_on: SingleSignOnDep,
    settings: SettingsDep,
    auth: AuthDep,
    *,
    invitation: str = "",
    tenant: str = "",
) -> RedirectResponse:
    """`invitation` links the account to the invited member; `tenant` chooses a membership."""
    sso = _configured(sign_on)
    if max(len(invitation), len(tenant)) > 100:  # they travel in a cookie
        raise BadRequest("The invitation or the tenant is too long.", next_step="Copy the link.")
    # The caller has no credentials yet, and the issuer may take seconds to answer.
    address = request.client.host if request.client else ""
    auth.sign_ins.check(address)
    await auth.sign_ins.failed(address)
    flow = await run_as(
        Work.SIGN_ON, sso.begin, _redirect_uri(request, settings), invitation, tenant
    )
    answer = RedirectResponse(flow.url, 303)
    answer.set_cookie(
        _FLOW_COOKIE,
        flow.cookie,
        max_age=SIGN_IN_TIMEOUT_S,
        path=f"{_HOME}/sso",
        httponly=True,
        samesite="lax",  # the browser must send it with the issuer's redirect
        secure=_secure(request, settings),
    )
    return answer


@router.get("/callback")
async def callback(
    request: Request,
    sessions: Annotated[_Sessions, Depends(_Sessions)],
    sign_on: SingleSignOnDep,
    auth: AuthDep,
    settings: SettingsDep,
    *,
    state: str = "",
    code: str = "",
    error: str = "",
) -> RedirectResponse:
    attempts = auth.attempts
    address = request.client.host if request.client else ""
    attempts.check(address)
    try:
        if error or not code:
            raise Unauthenticated("The issuer refused the sign-in.", next_step="Try again.")
        cookie = request.cookies.get(_FLOW_COOKIE, "")
        redirect_uri = _redirect_uri(request, settings)
        identity = await run_as(
            Work.SIGN_ON, _configured(sign_on).finish, redirect_uri, state, code, cookie
        )
        signed_in = await run_as(Work.SIGN_ON, sessions.begin, identity)
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
        secure=_secure(request, settings),
    )
    return answer


def _configured(sign_on: SingleSignOn | None) -> SingleSignOn:
    if sign_on is None:
        raise NotFound("Single sign-on is not configured.", next_step="Sign in with a password.")
    return sign_on


def _redirect_uri(request: Request, settings: Settings) -> str:
    base = settings.public_url.rstrip("/") or str(request.base_url).rstrip("/")
    return f"{base}{_HOME}/sso/callback"


def _secure(request: Request, settings: Settings) -> bool:
    return settings.public_url.startswith("https://") or request.url.scheme == "https"
