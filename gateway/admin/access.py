"""Access to admin routes: by the operator's token, an API key or a dashboard session; casbin decides.

Every route names an object and an action with `RequirePermission` or `RequireOperator`; a test
walks them.
"""

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Query, Request

from core.clock import Clock
from core.database import Database
from core.errors import Forbidden, Unauthenticated
from core.tenants import access, operators, sessions
from core.tenants.access import THE_OPERATOR, Actor
from core.tenants.operator import is_operator_token
from core.tenants.scope import TenantScope
from gateway.edge.tenant_slots import take_slot
from gateway.edge.threads import Work, current_tenant, run_as
from gateway.request.exchange import Exchange
from gateway.serving.api.dependencies import AuthDep, ClockDep, DatabaseDep, OperatorToken, RolesDep

SESSION_COOKIE = "tollhouse_session"
TenantQuery = Annotated[
    str | None, Query(description="Id or name of the tenant; your own by default.")
]


@dataclass(frozen=True, slots=True)
class AdminContext:
    """An authorised admin call on one tenant."""

    database: Database
    clock: Clock
    actor: Actor
    scope: TenantScope


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """An authorised admin call on resources that belong to no tenant."""

    database: Database
    clock: Clock
    actor: Actor


async def actor_of(
    request: Request, auth: AuthDep, database: DatabaseDep, clock: ClockDep, token: OperatorToken
) -> Actor:
    if "authorization" in request.headers or "x-api-key" in request.headers:
        if is_operator_token(token, _bearer_token(request)):
            return THE_OPERATOR
        if operators.is_token(_bearer_token(request)):
            return await run_as(Work.KEYS, _named_operator, database, _bearer_token(request))
        exchange = Exchange(dict(request.scope), request.receive, None)
        key = await auth.principal(exchange, request.url.path)
        return Actor(key.key_id, key.role, key.tenant_id, key.project_id)
    cookie = request.cookies.get(SESSION_COOKIE)
    if cookie is None:
        raise Unauthenticated(
            "No credentials were sent.",
            next_step="Send `Authorization: Bearer` with an API key or the operator's token.",
        )
    if request.method not in ("GET", "HEAD") and not _same_origin(request):
        raise Forbidden(
            "The Origin header is missing or names another site, so the session cookie is refused.",
            next_step="Send the call from the dashboard, or use an API key.",
        )
    address = request.client.host if request.client else ""
    actor = await run_as(Work.KEYS, _actor_from_cookie, database, clock, cookie, address)
    if actor is None:
        raise Unauthenticated("The session has ended.", next_step="Sign in again.")
    return actor


ActorDep = Annotated[Actor, Depends(actor_of)]


@dataclass(frozen=True)
class RequirePermission:
    obj: str
    act: str

    async def __call__(
        self,
        request: Request,
        actor: ActorDep,
        database: DatabaseDep,
        clock: ClockDep,
        roles: RolesDep,
        tenant: TenantQuery = None,
    ) -> AdminContext:
        def _authorise() -> TenantScope:
            with database.read() as session:
                return access.authorise(session, roles, actor, tenant, self.obj, self.act)

        scope = await run_as(Work.KEYS, _authorise)
        current_tenant.set(scope.tenant_id)
        # The operator is no tenant: work on one's behalf must not wait for the tenant's own.
        await take_slot(request, actor.tenant_id or "")
        return AdminContext(database, clock, actor, scope)


@dataclass(frozen=True)
class RequireOperator:
    obj: str
    act: str

    async def __call__(
        self, actor: ActorDep, database: DatabaseDep, clock: ClockDep, roles: RolesDep
    ) -> OperatorContext:
        def _authorise() -> None:
            with database.read() as session:
                access.authorise_operator(session, roles, actor, self.obj, self.act)

        await run_as(Work.KEYS, _authorise)
        return OperatorContext(database, clock, actor)


def _bearer_token(request: Request) -> str:
    given = request.headers.getlist("authorization")
    kind, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    return token.strip() if kind.lower() == "bearer" else ""


def _named_operator(database: Database, secret: str) -> Actor:
    with database.read() as session:
        return operators.actor_of(operators.find(session, secret))


def _actor_from_cookie(database: Database, clock: Clock, cookie: str, address: str) -> Actor | None:
    with database.read() as session:
        return sessions.find(session, clock, cookie, address)


def _same_origin(request: Request) -> bool:
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc == request.headers.get("host")
