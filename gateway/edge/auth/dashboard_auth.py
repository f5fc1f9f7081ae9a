"""Authentication and authorisation for the dashboard, based on members, keys and roles."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.accounts import timezone_of
from core.clock import Clock
from core.errors import Forbidden, Unauthenticated
from core.tenants import (
    audit,
    keys,
    members,
    operators,
    organisations,
    sessions,
    sign_on_connections,
)
from core.tenants.access import Actor, scope_for
from core.tenants.members import PasswordProof
from core.tenants.models import ApiKey, Member, Tenant
from core.tenants.operator import is_operator_token
from core.tenants.roles import Roles
from dashboards.viewer import SignedIn, Viewer
from gateway.edge.auth.attempts import FailedAttempts


class DashboardAuth:
    def __init__(
        self, roles: Roles, attempts: FailedAttempts, clock: Clock, operator_token: str
    ) -> None:
        self._roles = roles
        self._attempts = attempts
        self._clock = clock
        self._operator_token = operator_token

    @asynccontextmanager
    async def attempt(self, address: str, *, give_back: bool = True) -> AsyncIterator[None]:
        taken = await self._attempts.take(address)
        try:
            yield
        except Unauthenticated:
            raise
        except BaseException:
            await self._attempts.give_back(taken)
            raise
        if give_back:
            await self._attempts.give_back(taken)

    def sign_in(
        self, session: Session, *, proof: PasswordProof | None, secret: str, address: str
    ) -> SignedIn:
        """Inside `attempt`. Raises Unauthenticated."""
        cookie = self._start_session(session, proof, secret, address)
        return self._signed_in(session, cookie, address)

    def sign_in_member(self, session: Session, member: Member) -> SignedIn:
        """Start a session for a member whom single sign-on or a link has authenticated."""
        return self._signed_in(session, sessions.begin(session, self._clock, member_id=member.id))

    def find(self, session: Session, cookie: str, address: str = "") -> Viewer | None:
        if not cookie:
            return None
        actor = sessions.find(session, self._clock, cookie, address)
        if actor is None:
            return None
        self._roles.refresh(session)
        return self._viewer(session, actor, cookie)

    def sign_out(self, session: Session, cookie: str) -> None:
        sessions.end(session, self._clock, cookie)

    def look_at(self, session: Session, viewer: Viewer, cookie: str, tenant: str) -> None:
        """Show the operator a tenant's pages, by id or a part of its name; the audit log records it."""
        if not viewer.operator:
            raise Forbidden(
                "Only the operator may view other tenants.", next_step="View your own tenant."
            )
        row = organisations.tenant_like(session, tenant)
        sessions.choose_tenant(session, cookie, row.id)
        scope = scope_for(Actor(viewer.scope.actor, viewer.role, None), row.id)
        audit.record(session, scope, self._clock, "operator.look", row.id, before=None, after=None)

    def may(self, viewer: Viewer, obj: str, act: str) -> bool:
        tenant = viewer.scope.tenant_id
        own_tenant = None if viewer.operator else tenant
        return self._roles.allows(viewer.role, own_tenant, tenant, obj, act)

    def _start_session(
        self, session: Session, proof: PasswordProof | None, secret: str, address: str
    ) -> str:
        if proof is not None:
            member = members.authenticate_password(session, self._clock, proof)
            return sessions.begin(session, self._clock, member_id=member.id)
        if is_operator_token(self._operator_token, secret):
            return sessions.begin(session, self._clock, operator=True)
        if operators.is_token(secret):
            named = operators.find(session, secret)
            return sessions.begin(session, self._clock, operator=True, operator_name=named.name)
        key = keys.find(session, secret, self._clock.now())
        sessions.check_key(key, address)
        sign_on_connections.require_other_way(session, key.tenant_id, None)
        return sessions.begin(session, self._clock, key_id=key.key_id)

    def _signed_in(self, session: Session, cookie: str, address: str = "") -> SignedIn:
        viewer = self.find(session, cookie, address)
        if viewer is None:
            raise Unauthenticated("This organisation is closed.", next_step="Ask the operator.")
        return SignedIn(cookie, viewer)

    def _viewer(self, session: Session, actor: Actor, cookie: str) -> Viewer | None:
        tenant = _tenant_of(session, actor, cookie)
        if tenant is None:
            return None
        return Viewer(
            scope=scope_for(actor, tenant.id),
            tenant_name=tenant.display_name,
            name=_name_of(session, actor),
            role=actor.role,
            currency=tenant.currency,
            timezone=timezone_of(session, tenant.id),
            operator=actor.is_operator,
        )


def _tenant_of(session: Session, actor: Actor, cookie: str) -> Tenant | None:
    tenant_id = actor.tenant_id or sessions.chosen_tenant(session, cookie)
    if tenant_id is not None:
        return session.get(Tenant, tenant_id)
    # The operator's own pages span all tenants; the others show the oldest tenant until one is chosen.
    return session.scalars(select(Tenant).order_by(Tenant.created_at, Tenant.id)).first()


def _name_of(session: Session, actor: Actor) -> str:
    if actor.is_operator:
        return actor.id.removeprefix("operator:")
    member = session.get(Member, actor.id)
    if member is not None:
        return member.name or member.email
    key = session.get(ApiKey, actor.id)
    return key.name if key is not None else actor.id
