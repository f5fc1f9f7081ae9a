"""One-time links: a member chooses a password with one, and asks for one after forgetting it."""

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from billing.notices import member_mails
from billing.notices.mail_text import RESET
from core.errors import BadRequest, RateLimited
from core.tenants import invitations, members, passwords, sign_on_connections
from core.tenants.models import Tenant
from dashboards.pages.common import address_of, base_of, deps_of, root_of
from dashboards.pages.sign_in import with_session
from dashboards.render import page
from dashboards.viewer import SignedIn

_LONGEST_TOKEN = 100
_Invited = tuple[str, str, bool]  # address, organisation, whether it has an issuer of its own


async def form(request: Request) -> Response:
    token = request.query_params.get("token", "")[:_LONGEST_TOKEN]
    return await _form(request, token)


async def _form(request: Request, token: str, problem: str = "", status: int = 200) -> Response:
    deps = deps_of(request)

    def _find() -> _Invited:
        with deps.database.read() as session:
            member = invitations.member_of(session, deps.clock, token)
            own = sign_on_connections.of_tenant(session, member.tenant_id) is not None
            return member.email, session.get_one(Tenant, member.tenant_id).display_name, own

    async with deps.auth.attempt(address_of(request)):
        email, organisation, has_own = await run_in_threadpool(_find)
    return _outside(
        request,
        "invitation.html",
        status,
        token=token,
        email=email,
        organisation=organisation,
        problem=problem,
        least=passwords.MIN_LENGTH,
        sso=deps.single_sign_on or has_own,
    )


async def accept(request: Request) -> Response:
    async with request.form(max_fields=8, max_part_size=10_000) as fields:
        token = str(fields.get("token", ""))[:_LONGEST_TOKEN]
        password = str(fields.get("password", ""))
    deps = deps_of(request)

    def _accept() -> SignedIn:
        with deps.database.read() as session:
            email = invitations.member_of(session, deps.clock, token).email
        hashed = members.hash_for(deps.database, email, password)
        with deps.database.transaction() as session:
            member = invitations.accept_with_password(session, deps.clock, token, hashed)
            return deps.auth.sign_in_member(session, member)

    try:
        async with deps.auth.attempt(address_of(request)):
            created = await run_in_threadpool(_accept)
    except BadRequest as error:
        return await _form(request, token, str(error), error.status)
    return with_session(request, created)


def reset_form(request: Request) -> Response:
    if not deps_of(request).alert_targets.sends_mail:
        return RedirectResponse(f"{root_of(request)}/sign-in", 303)
    return _outside(request, "reset.html", sent=False, problem="")


async def reset(request: Request) -> Response:
    """Answers the same whether the address is a member's or not; every call counts as an attempt."""
    async with request.form(max_fields=4, max_part_size=10_000) as fields:
        email = str(fields.get("email", "")).strip()[:320]
    deps, base = deps_of(request), base_of(request)

    def _send() -> None:
        now = deps.clock.now()
        with deps.database.transaction() as session:
            for tenant_id, link in invitations.reset(session, deps.clock, email):
                member_mails.send_link(session, tenant_id, link, base, now, RESET)

    try:
        async with deps.auth.attempt(address_of(request), give_back=False):
            if deps.alert_targets.sends_mail:
                await run_in_threadpool(_send)
    except RateLimited as error:
        return _outside(request, "reset.html", error.status, sent=False, problem=str(error))
    return _outside(request, "reset.html", sent=True, problem="")


def _outside(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    """Without the frame of the signed-in person: the invited one may be another."""
    request.state.viewer = None
    return page(request, template, status, **values)


ROUTES = [
    Route("/invitation", form, methods=["GET"]),
    Route("/invitation", accept, methods=["POST"]),
    Route("/reset", reset_form, methods=["GET"]),
    Route("/reset", reset, methods=["POST"]),
]
