"""A tenant's own issuer of OpenID Connect: who may sign in by it, and whether there is another way.

The issuer speaks for the tenant's members alone, and only for addresses of domains that the operator
has recorded as the tenant's. A person of such an address who is not a member becomes one where the
connection has a role for them, which is never the owner's.
"""

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.errors import BadRequest, Conflict, NotFound, Unauthenticated
from core.ids import new_id
from core.tenants import audit, key_bounds, sessions
from core.tenants.models import Member, SignOnConnection, Tenant, TenantDomain
from core.tenants.roles import MEMBER_ROLES
from core.tenants.scope import TenantScope

NEW_MEMBER_ROLES = tuple(each for each in MEMBER_ROLES if each != "owner")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionDraft:
    issuer: str
    client_id: str
    client_secret: str | None = None  # None: as it is
    new_member_role: str | None = None  # None: members are invited


def of_tenant(session: Session, tenant_id: str) -> SignOnConnection | None:
    query = select(SignOnConnection).where(SignOnConnection.tenant_id == tenant_id)
    return session.scalars(query).first()


def get(session: Session, scope: TenantScope) -> SignOnConnection:
    found = of_tenant(session, scope.tenant_id)
    if found is None:
        raise NotFound(
            "The organisation has no single sign-on of its own.",
            next_step="Set its issuer and client first.",
        )
    return found


def tenant_of(session: Session, name_or_email: str) -> str | None:
    """The id of the tenant with a connection that has this name, id or domain of an address."""
    word = name_or_email.strip()
    own = select(SignOnConnection.tenant_id)
    if "@" in word:
        domain = word.rpartition("@")[2].lower()
        joined = own.join(TenantDomain, TenantDomain.tenant_id == SignOnConnection.tenant_id)
        return session.scalar(joined.where(TenantDomain.domain == domain))
    joined = own.join(Tenant, Tenant.id == SignOnConnection.tenant_id)
    return session.scalar(joined.where((Tenant.id == word) | (Tenant.name == word)))


def put(
    session: Session, scope: TenantScope, clock: Clock, draft: ConnectionDraft
) -> SignOnConnection:
    """Another issuer or client has to be tested again before it can be the only way."""
    key_bounds.check_unrestricted(session, scope)
    _check(draft)
    row = of_tenant(session, scope.tenant_id)
    before = describe(row) if row is not None else None
    if row is None:
        row = SignOnConnection(
            id=new_id("sso"),
            tenant_id=scope.tenant_id,
            client_secret="",
            forced=False,
            created_at=clock.now(),
        )
        session.add(row)
    client = (draft.issuer.rstrip("/"), draft.client_id)
    if (row.issuer, row.client_id) != client:
        row.tested_at, row.forced = None, False
    row.issuer, row.client_id = client
    if draft.client_secret is not None:
        row.client_secret = draft.client_secret
    row.new_member_role = draft.new_member_role
    session.flush()
    after = describe(row)
    audit.record(session, scope, clock, "sign_on.set", row.id, before=before, after=after)
    return row


def force(
    session: Session, scope: TenantScope, clock: Clock, forced: bool, break_glass: str = ""
) -> SignOnConnection:
    """With `forced`, members sign in by the connection alone, but for the owner `break_glass` (an e-mail
    address), who keeps a password for the day on which the issuer is down. Other sessions end."""
    key_bounds.check_unrestricted(session, scope)
    row = get(session, scope)
    before = describe(row)
    if forced:
        if row.tested_at is None:
            raise Conflict(
                "This connection was never tested.", next_step="Test it, then force it on."
            )
        row.break_glass_id = _break_glass(session, scope, break_glass).id
    row.forced = forced
    session.flush()
    if forced:
        members = select(Member.id).where(Member.tenant_id == scope.tenant_id)
        for member_id in session.scalars(members).all():
            if member_id not in (scope.actor, row.break_glass_id):
                sessions.revoke_all(session, clock, member_id)
    audit.record(session, scope, clock, "sign_on.force", row.id, before=before, after=describe(row))
    return row


def _break_glass(session: Session, scope: TenantScope, email: str) -> Member:
    query = select(Member).where(
        Member.tenant_id == scope.tenant_id, Member.email == email.strip().lower()
    )
    member = session.scalars(query).first()
    usable = member is not None and member.role == "owner" and member.disabled_at is None
    if member is None or not usable or member.password_hash is None:
        raise BadRequest(
            f"{email[:80]!r} is not an owner with a password.",
            next_step="Name an owner who can sign in with a password when the issuer is down.",
            param="break_glass",
        )
    return member


def mark_tested(session: Session, clock: Clock, tenant_id: str) -> None:
    row = of_tenant(session, tenant_id)
    if row is not None:
        row.tested_at = clock.now()


def remove(session: Session, scope: TenantScope, clock: Clock) -> None:
    """Members that are linked stay so, and sign in with a password or an invitation again."""
    key_bounds.check_unrestricted(session, scope)
    row = get(session, scope)
    session.delete(row)
    audit.record(session, scope, clock, "sign_on.remove", row.id, before=describe(row), after=None)


def require_other_way(session: Session, tenant_id: str, member_id: str | None) -> None:
    """Unauthenticated where the tenant's members sign in by its connection alone. `member_id`: who
    signs in with a password; None for a key."""
    row = of_tenant(session, tenant_id)
    if row is not None and row.forced and member_id != row.break_glass_id:
        raise Unauthenticated(
            "Your organisation asks for single sign-on.",
            next_step="Choose *Sign in with your organisation*.",
            code="sign_on_required",
        )


def describe(row: SignOnConnection) -> dict[str, Any]:
    names = ("issuer", "client_id", "new_member_role", "forced", "break_glass_id")
    shown = {name: getattr(row, name) for name in names}
    tested = row.tested_at.isoformat() if row.tested_at else None
    return shown | {"has_secret": bool(row.client_secret), "tested_at": tested}


def _check(draft: ConnectionDraft) -> None:
    parts = urlsplit(draft.issuer)
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.query or parts.fragment:
        raise BadRequest(
            f"The issuer {draft.issuer[:80]!r} is not the URL of an issuer.",
            next_step="Write it as https://login.example.com, as the provider shows it.",
            param="issuer",
        )
    if not draft.client_id.strip():
        raise BadRequest(
            "The client id is empty.", next_step="Copy it from the provider.", param="client_id"
        )
    if draft.new_member_role not in (None, *NEW_MEMBER_ROLES):
        raise BadRequest(
            f"New members cannot have the role {draft.new_member_role!r}.",
            next_step=f"Use one of {', '.join(NEW_MEMBER_ROLES)}, or none.",
            param="new_member_role",
        )
