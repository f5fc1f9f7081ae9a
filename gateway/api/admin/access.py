"""Access to admin routes: by the operator's token, an API key or a dashboard session; casbin decides.

Every route names an object and an action with `RequirePermission` or `RequireOperator`; a test
walks them.
"""

import asyncio
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Query, Request

from core.errors import Forbidden, Unauthenticated
from core.tenants import access, sessions
from core.tenants.access import THE_OPERATOR, Actor
from core.tenants.operator import is_operator_token
from core.tenants.scope import TenantScope
from gateway.api.access import ServicesDep
from gateway.http.exchange import Exchange
from gateway.wiring import Services

SESSION_COOKIE = "tollhouse_session"
TenantQuery = Annotated[
    str | None, Query(description="Id or name of the tenant; your own by default.")
]


@dataclass(frozen=True, slots=True)
class AdminContext:
    """An authorised admin call on one tenant."""

    services: Services
    actor: Actor
    scope: TenantScope


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """An authorised admin call on resources that belong to no tenant."""

    services: Services
    actor: Actor


@dataclass(frozen=True)
class RequirePermission:
    obj: str
    act: str

    async def __call__(
        self, request: Request, services: ServicesDep, tenant: TenantQuery = None
    ) -> AdminContext:
        actor = await actor_of(request, services)

        def _authorise() -> TenantScope:
            with services.database.read() as session:
                return access.authorise(session, services.roles, actor, tenant, self.obj, self.act)

        return AdminContext(services, actor, await asyncio.to_thread(_authorise))


@dataclass(frozen=True)
class RequireOperator:
    obj: str
    act: str

    async def __call__(self, request: Request, services: ServicesDep) -> OperatorContext:
        actor = await actor_of(request, services)

        def _authorise() -> None:
            with services.database.read() as session:
                access.authorise_operator(session, services.roles, actor, self.obj, self.act)

        await asyncio.to_thread(_authorise)
        return OperatorContext(services, actor)


async def actor_of(request: Request, services: Services) -> Actor:
    if "authorization" in request.headers or "x-api-key" in request.headers:
        return await _actor_from_token(request, services)
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
    actor = await asyncio.to_thread(_actor_from_cookie, services, cookie)
    if actor is None:
        raise Unauthenticated("The session has ended.", next_step="Sign in again.")
    return actor


async def _actor_from_token(request: Request, services: Services) -> Actor:
    given = request.headers.getlist("authorization")
    kind, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    if kind.lower() == "bearer" and is_operator_token(services.operator_token, token.strip()):
        return THE_OPERATOR
    exchange = Exchange(dict(request.scope), request.receive, None)
    key = await services.pipeline.auth.principal(exchange, request.url.path)
    return Actor(key.key_id, key.role, key.tenant_id, key.project_id)


def _actor_from_cookie(services: Services, cookie: str) -> Actor | None:
    with services.database.read() as session:
        return sessions.find(session, services.clock, cookie)


def _same_origin(request: Request) -> bool:
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc == request.headers.get("host")
