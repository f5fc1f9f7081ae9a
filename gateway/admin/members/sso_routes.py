"""/dashboard/sso: the OpenID Connect sign-in, which ends in a dashboard session."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import RedirectResponse

from core.errors import BadRequest, Unauthenticated
from core.settings import Settings
from core.tenants import sign_on as members
from core.tenants.sign_on import ExternalIdentity
from dashboards.viewer import SignedIn
from gateway.edge.auth.sign_on_directory import SignOnDirectory
from gateway.edge.auth.single_sign_on import SIGN_IN_TIMEOUT_S, SignInFlow, SignInRequest
from gateway.edge.threads import Work, run_as
from gateway.serving.api.dependencies import (
    AuthDep,
    ClockDep,
    DashboardAuthDep,
    DatabaseDep,
    SettingsDep,
    SignOnDep,
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
    sign_on: SignOnDep,
    settings: SettingsDep,
    auth: AuthDep,
    *,
    invitation: str = "",
    tenant: str = "",
    test: bool = False,
) -> RedirectResponse:
    """`invitation` links the account to the invited member; `tenant` (a name, an id or an e-mail
    address) chooses the issuer and a membership; `test` signs nobody in."""
    if len(invitation) > 100 or len(tenant) > 320:  # they travel in a cookie
        raise BadRequest("The invitation or the tenant is too long.", next_step="Copy the link.")
    # The caller has no credentials yet, and the issuer may take seconds to answer.
    address = request.client.host if request.client else ""
    auth.sign_ins.check(address)
    await auth.sign_ins.failed(address)

    def _begin() -> SignInFlow:
        connection = sign_on.choose(invitation, tenant)
        chosen = "" if "@" in tenant else tenant
        asked = SignInRequest(invitation, chosen, test and bool(connection))
        return sign_on.of(connection).begin(_redirect_uri(request, settings), asked)

    flow = await run_as(Work.SIGN_ON, _begin)
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
    sign_on: SignOnDep,
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

        def _finish() -> ExternalIdentity:
            issuer = sign_on.of(sign_on.started_with(cookie))
            return issuer.finish(redirect_uri, state, code, cookie)

        identity = await run_as(Work.SIGN_ON, _finish)
        if identity.test:
            return await _tested(sign_on, identity)
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


async def _tested(sign_on: SignOnDirectory, identity: ExternalIdentity) -> RedirectResponse:
    """Back to the page of the connection, which was tested if it names a verified address."""
    if not identity.email:
        raise Unauthenticated(
            "The issuer answered, but names no verified e-mail address.",
            next_step="Let it send the claim `email`, then test again.",
        )
    await run_as(Work.SIGN_ON, sign_on.tested, identity.connection)
    answer = RedirectResponse(f"{_HOME}/single-sign-on?notice=sign-on-tested", 303)
    answer.delete_cookie(_FLOW_COOKIE, path=f"{_HOME}/sso")
    return answer


def _redirect_uri(request: Request, settings: Settings) -> str:
    base = settings.public_url.rstrip("/") or str(request.base_url).rstrip("/")
    return f"{base}{_HOME}/sso/callback"


def _secure(request: Request, settings: Settings) -> bool:
    return settings.public_url.startswith("https://") or request.url.scheme == "https"
