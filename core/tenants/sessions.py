"""Server-side sessions of the dashboard: the cookie holds a secret, the table its hash."""

import secrets
from datetime import datetime, timedelta

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core.clock import Clock
from core.errors import Forbidden, Unauthenticated
from core.tenants import keys, operators
from core.tenants.access import THE_OPERATOR, Actor
from core.tenants.key_scopes import KeyScopes
from core.tenants.models import DashboardSession, Member, Tenant
from core.tenants.secrets import digest

LIFETIME = timedelta(hours=12)


def begin(
    session: Session,
    clock: Clock,
    *,
    member_id: str | None = None,
    key_id: str | None = None,
    operator: bool = False,
    operator_name: str | None = None,
) -> str:
    """For exactly one of a member, a key or the operator. Returns the secret for the cookie."""
    if sum((member_id is not None, key_id is not None, operator)) != 1:
        raise ValueError("a session needs exactly one of member_id, key_id and operator")
    secret = secrets.token_urlsafe(32)
    session.add(
        DashboardSession(
            secret_sha256=digest(secret),
            member_id=member_id,
            key_id=key_id,
            operator=operator,
            operator_name=operator_name,
            created_at=clock.now(),
            expires_at=clock.now() + LIFETIME,
        )
    )
    session.flush()
    return secret


def find(session: Session, clock: Clock, secret: str, address: str = "") -> Actor | None:
    """The current actor of a session; None if it ended, or if its member or key could not sign in now
    from this address."""
    row = session.get(DashboardSession, digest(secret))
    now = clock.now()
    if row is None or row.revoked_at is not None or row.expires_at <= now:
        return None
    if row.operator:
        named = row.operator_name
        return operators.actor_named(session, named) if named else THE_OPERATOR
    if row.member_id is not None:
        return _member(session, row.member_id)
    return _key(session, row.key_id or "", address, now)


def choose_tenant(session: Session, secret: str, tenant_id: str) -> None:
    """Set the tenant whose pages an operator's session shows."""
    row = session.get(DashboardSession, digest(secret))
    if row is not None and row.operator:
        row.chosen_tenant = tenant_id


def chosen_tenant(session: Session, secret: str) -> str | None:
    row = session.get(DashboardSession, digest(secret))
    return row.chosen_tenant if row is not None and row.operator else None


def end(session: Session, clock: Clock, secret: str) -> None:
    row = session.get(DashboardSession, digest(secret))
    if row is not None and row.revoked_at is None:
        row.revoked_at = clock.now()


def revoke_all(session: Session, clock: Clock, member_id: str) -> None:
    """End all sessions of a member."""
    session.execute(
        update(DashboardSession)
        .where(DashboardSession.member_id == member_id, DashboardSession.revoked_at.is_(None))
        .values(revoked_at=clock.now())
    )


def _member(session: Session, member_id: str) -> Actor | None:
    member = session.get(Member, member_id)
    if (
        member is None
        or member.disabled_at is not None
        or not _may_sign_in(session, member.tenant_id)
    ):
        return None
    return Actor(member.id, member.role, member.tenant_id)


def _key(session: Session, key_id: str, address: str, now: datetime) -> Actor | None:
    try:
        key = keys.find_by_id(session, key_id, now)
        check_key(key, address)
    except (Unauthenticated, Forbidden):
        return None
    return Actor(key.key_id, key.role, key.tenant_id, key.project_id)


def check_key(key: keys.Principal, address: str) -> None:
    """Unauthenticated or Forbidden for a key that may not have a session from this address."""
    if not keys.address_allowed(key.allowed_ips, address):
        raise Unauthenticated(
            f"This key may not be used from {address}.", next_step="Use another key."
        )
    if key.scopes != KeyScopes():
        raise Forbidden(
            "This key is restricted to some models or routes, so it cannot open the dashboard.",
            next_step="Sign in with your e-mail address, or with an unrestricted key.",
        )


def _may_sign_in(session: Session, tenant_id: str) -> bool:
    """Members of a suspended tenant may still sign in; those of a closed one may not."""
    status = session.scalar(select(Tenant.status).where(Tenant.id == tenant_id))
    return status is not None and status != "closed"
