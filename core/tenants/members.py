"""Members: the users of a tenant, with a role and a password, a single sign-on identity, or both."""

import re
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.database import Database
from core.errors import BadRequest, Conflict, Forbidden, NotFound, Unauthenticated
from core.ids import MEMBER, new_id
from core.tenants import audit, key_bounds, keys, passwords, sessions, sign_on_connections
from core.tenants.models import Member, Tenant
from core.tenants.passwords import PasswordHash
from core.tenants.roles import MEMBER_ROLES, may_grant
from core.tenants.scope import TenantScope

_EMAIL = re.compile(r"[^@\s]{1,64}@[^@\s]+\.[^@\s]+|[^@\s]{1,64}@localhost")
_MAY_SIGN_IN = (Member.disabled_at.is_(None), Tenant.status != "closed")


def add(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    *,
    email: str,
    role: str,
    name: str = "",
    password_hash: PasswordHash | None = None,
) -> Member:
    """`password_hash` is what `hash_for` returned. Without it the member enters by an invitation or by
    single sign-on."""
    address = _address(email)
    key_bounds.check_unrestricted(session, scope)
    check_grant(scope, role)
    existing = select(Member).where(Member.tenant_id == scope.tenant_id, Member.email == address)
    known = session.scalar(existing)
    if known is not None:
        if not _is_removed(known):
            raise Conflict(
                f"{address} is already a member.",
                next_step="Change the existing member instead.",
                param="email",
            )
        return _come_back(session, scope, clock, known, role, password_hash)
    member = Member(
        id=new_id(MEMBER),
        tenant_id=scope.tenant_id,
        email=address,
        name=name[:200],
        role=role,
        password_hash=password_hash,
        password_by=scope.role if password_hash is not None else None,
        created_at=clock.now(),
    )
    session.add(member)
    session.flush()
    audit.record(
        session, scope, clock, "member.add", member.id, before=None, after=describe(member)
    )
    return member


def change(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    member_id: str,
    *,
    role: str | None = None,
    name: str | None = None,
    disabled: bool | None = None,
    keep_keys: bool = False,
) -> Member:
    """Changing the role or disabling the member ends all of its sessions and its invitation. The keys
    of a disabled member stop, unless the acting member answers for them from now on (`keep_keys`)."""
    member = get(session, scope, member_id)
    key_bounds.check_unrestricted(session, scope)
    before = describe(member)
    check_grant(scope, member.role)
    if role is not None:
        check_grant(scope, role)
        member.role = role
        end_password(member)
        end_account(member)
    if name is not None:
        member.name = name[:200]
    if disabled is not None:
        member.disabled_at = clock.now() if disabled else None
    if disabled and keep_keys:
        keys.hand_over(session, scope, clock, member.id)
    session.flush()
    if before["role"] == "owner":
        _require_owner(session, scope)
    if role is not None or disabled:
        sessions.revoke_all(session, clock, member.id)
        member.invitation_sha256 = member.invitation_expires_at = member.invitation_by = None
    audit.record(
        session, scope, clock, "member.change", member.id, before=before, after=describe(member)
    )
    return member


def remove(session: Session, scope: TenantScope, clock: Clock, member_id: str) -> None:
    """Disable the member and forget how it signs in. Its rows stay, for the audit log and for usage;
    who is added again under the same address is the same member."""
    member = change(session, scope, clock, member_id, disabled=True)
    member.password_hash = member.password_by = member.oidc_subject = member.oidc_by = None
    session.flush()


def _is_removed(member: Member) -> bool:
    ways = (member.password_hash, member.oidc_subject)
    return member.disabled_at is not None and ways == (None, None)


def _come_back(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    member: Member,
    role: str,
    password_hash: PasswordHash | None,
) -> Member:
    change(session, scope, clock, member.id, role=role, disabled=False)
    member.password_hash = password_hash
    member.password_by = scope.role if password_hash is not None else None
    session.flush()
    return member


def end_password(member: Member) -> None:
    """The person who set it knows it, and may not have the member's new role."""
    if member.password_by is not None and not may_grant(member.password_by, member.role):
        member.password_hash = member.password_by = None


def end_account(member: Member) -> None:
    """The same for whoever saw the link by which the account was linked."""
    if member.oidc_by is not None and not may_grant(member.oidc_by, member.role):
        member.oidc_subject = member.oidc_by = None


def set_password(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    member_id: str,
    password_hash: PasswordHash,
) -> None:
    """`password_hash` is what `hash_for` returned. Members set their own password;
    admins also that of members whose role they may grant."""
    member = get(session, scope, member_id)
    key_bounds.check_unrestricted(session, scope)
    if scope.actor != member.id:
        check_grant(scope, member.role)
    member.password_hash = password_hash
    if scope.actor != member.id:
        member.password_by = scope.role
    elif member.password_by is None:
        # Who signed in with an account that another may have linked may be that other person.
        member.password_by = member.oidc_by
    session.flush()
    sessions.revoke_all(session, clock, member.id)
    audit.record(session, scope, clock, "member.password", member.id, before=None, after=None)


@dataclass(frozen=True, slots=True)
class PasswordProof:
    """That somebody knows the password of a member whose hash is `stored`."""

    member_id: str
    stored: str
    renewed: PasswordHash | None = (
        None  # with the parameters of today, if those of `stored` are older
    )


def check_password(database: Database, email: str, password: str) -> PasswordProof:
    """Outside of transactions: hashes take long. The same Unauthenticated for an unknown address, a wrong
    password and a disabled member."""
    query = (
        select(Member.id, Member.password_hash)
        .join(Tenant, Tenant.id == Member.tenant_id)
        .where(Member.email == email.strip().lower(), *_MAY_SIGN_IN)
        .order_by(Member.last_seen_at.desc().nulls_last(), Member.id)
    )
    with database.read() as session:
        candidates = session.execute(query).all()
    matched = passwords.matching([stored for _, stored in candidates], password)
    for (member_id, stored), fits in zip(candidates, matched, strict=True):
        if fits and stored:
            outdated = passwords.needs_rehash(stored)
            renewed = hash_for(database, email, password) if outdated else None
            return PasswordProof(member_id, stored, renewed)
    raise _wrong_credentials()


def authenticate_password(session: Session, clock: Clock, proof: PasswordProof) -> Member:
    """Unauthenticated if the password was changed, or the member disabled, since the check."""
    query = select(Member).join(Tenant, Tenant.id == Member.tenant_id)
    known = (Member.id == proof.member_id, Member.password_hash == proof.stored)
    found = session.scalars(query.where(*known, *_MAY_SIGN_IN)).first()
    if found is None:
        raise _wrong_credentials()
    sign_on_connections.require_other_way(session, found.tenant_id, found.id)
    if proof.renewed is not None:
        found.password_hash = proof.renewed
    found.last_seen_at = clock.now()
    return found


def _wrong_credentials() -> Unauthenticated:
    return Unauthenticated(
        "Wrong e-mail address or password.",
        next_step="Check both and try again.",
        code="wrong_credentials",
    )


def get(session: Session, scope: TenantScope, member_id: str) -> Member:
    member = session.get(Member, member_id)
    if member is None or member.tenant_id != scope.tenant_id:
        raise NotFound(f"No member {member_id}.", next_step="List the members.")
    return member


def all_of(session: Session, scope: TenantScope) -> list[Member]:
    query = select(Member).where(Member.tenant_id == scope.tenant_id)
    return list(session.scalars(query.order_by(Member.id)))


def describe(member: Member) -> dict[str, Any]:
    moments = {
        name: moment.isoformat() if (moment := getattr(member, name)) else None
        for name in ("created_at", "disabled_at", "last_seen_at", "invitation_expires_at")
    }
    plain = {name: getattr(member, name) for name in ("id", "email", "name", "role")}
    plain["state"] = state_of(member)
    sign_in_methods = {
        "password": member.password_hash is not None,
        "sso": member.oidc_subject is not None,
    }
    return plain | sign_in_methods | moments


def state_of(member: Member) -> str:
    """`invited` until the member has a way to sign in."""
    if member.disabled_at is not None:
        return "disabled"
    has_way = member.password_hash is not None or member.oidc_subject is not None
    return "active" if has_way else "invited"


def hash_for(database: Database, email: str, password: str) -> PasswordHash:
    """The hash of a password, with the salt of other memberships of the same address. Before the
    transaction that stores it. BadRequest if the password is too short or too long."""
    query = select(Member.password_hash).where(
        Member.email == email.strip().lower(), Member.password_hash.is_not(None)
    )
    with database.read() as session:
        sibling = session.scalars(query.order_by(Member.id).limit(1)).first()
    return passwords.hash_password(password, sibling)


def _address(email: str) -> str:
    address = email.strip().lower()
    if len(address) > 320 or not _EMAIL.fullmatch(address):
        raise BadRequest(f"{email[:80]!r} is not an e-mail address.", param="email")
    return address


def check_grant(scope: TenantScope, role: str) -> None:
    if role not in MEMBER_ROLES:
        raise BadRequest(
            f"Unknown role {role!r}; use one of {', '.join(MEMBER_ROLES)}.", param="role"
        )
    if not may_grant(scope.role, role):
        raise Forbidden(
            f"The role {scope.role} may not add or change a member with the role {role}.",
            next_step="Ask an owner of the organisation.",
        )


def _require_owner(session: Session, scope: TenantScope) -> None:
    left = session.scalar(
        select(func.count()).where(
            Member.tenant_id == scope.tenant_id,
            Member.role == "owner",
            Member.disabled_at.is_(None),
        )
    )
    if not left:
        raise Conflict(
            "The last owner cannot be disabled or given another role.",
            next_step="Make another member an owner first.",
        )
