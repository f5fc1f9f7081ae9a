"""One-time links by which a member enters for the first time or sets a new password.

A link is for one member and ends with its use, after `LIFETIME`, with a newer link, and with a
change of the member's role. Only the hash of its token is stored.
"""

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.errors import Conflict, Unauthenticated
from core.tenants import audit, key_bounds, members, sessions, sign_on_connections
from core.tenants.access import Actor, scope_for
from core.tenants.models import Member, Tenant
from core.tenants.passwords import PasswordHash
from core.tenants.scope import TenantScope
from core.tenants.secrets import digest

LIFETIME = timedelta(days=7)
RESET_LIFETIME = timedelta(hours=1)  # of a link that somebody asks for who is not signed in


@dataclass(frozen=True, slots=True)
class Invitation:
    member_id: str
    email: str
    token: str  # returned only here
    expires_at: datetime

    def url(self, base: str) -> str:
        return f"{base.rstrip('/')}/dashboard/invitation?token={self.token}"


def invite(
    session: Session, scope: TenantScope, clock: Clock, member_id: str, *, shown: bool = True
) -> Invitation:
    """Replaces an earlier link. `shown` says that the caller sees the link, not the member alone."""
    member = members.get(session, scope, member_id)
    key_bounds.check_unrestricted(session, scope)
    members.check_grant(scope, member.role)
    if member.disabled_at is not None:
        raise Conflict(f"{member.email} is disabled.", next_step="Enable the member first.")
    made = _make(session, clock, member, LIFETIME)
    member.invitation_by = scope.role if shown else None
    session.flush()
    audit.record(
        session,
        scope,
        clock,
        "member.invite",
        member.id,
        before=None,
        after={"email": member.email},
    )
    return made


def reset(session: Session, clock: Clock, email: str) -> list[tuple[str, Invitation]]:
    """A link for each membership of the address with a password, and its tenant's id: for mails to that
    address only."""
    query = active().where(Member.email == email.strip().lower(), Member.password_hash.is_not(None))
    made = []
    for member in session.scalars(query.order_by(Member.id)):
        made.append((member.tenant_id, _make(session, clock, member, RESET_LIFETIME)))
        member.invitation_by = None
        scope = scope_for(Actor(member.id, member.role, member.tenant_id), member.tenant_id)
        audit.record(
            session, scope, clock, "member.reset_asked", member.id, before=None, after=None
        )
    return made


def member_of(session: Session, clock: Clock, token: str) -> Member:
    """The member whom a link is for. Unauthenticated if it ended."""
    member = session.scalars(active().where(Member.invitation_sha256 == digest(token))).first()
    expires_at = member.invitation_expires_at if member else None
    if member is None or expires_at is None or expires_at <= clock.now():
        raise Unauthenticated(
            "This link has expired or was used.",
            next_step="Ask an admin of your organisation for a new one.",
            code="not_a_member",
        )
    return member


def accept_with_password(
    session: Session, clock: Clock, token: str, password_hash: PasswordHash
) -> Member:
    """Set the password of the link's member, which ends the link and all sessions. `password_hash` is
    what `members.hash_for` returned."""
    member = member_of(session, clock, token)
    sign_on_connections.require_other_way(session, member.tenant_id, member.id)
    member.password_hash = password_hash
    # Who saw the link may have set this password.
    member.password_by = member.invitation_by
    member.last_seen_at = clock.now()
    use(member)
    session.flush()
    sessions.revoke_all(session, clock, member.id)
    scope = scope_for(Actor(member.id, member.role, member.tenant_id), member.tenant_id)
    audit.record(session, scope, clock, "member.password", member.id, before=None, after=None)
    return member


def use(member: Member) -> None:
    member.invitation_sha256 = member.invitation_expires_at = member.invitation_by = None


def active() -> Select[Member]:
    """Members who may sign in."""
    joined = select(Member).join(Tenant, Tenant.id == Member.tenant_id)
    return joined.where(Member.disabled_at.is_(None), Tenant.status != "closed")


def _make(session: Session, clock: Clock, member: Member, lifetime: timedelta) -> Invitation:
    token = secrets.token_urlsafe(32)
    expires_at = clock.now() + lifetime
    member.invitation_sha256, member.invitation_expires_at = digest(token), expires_at
    session.flush()
    return Invitation(member.id, member.email, token, expires_at)
