"""API keys: issued and shown once, looked up by hash, rotated with an overlap, revoked.

A valid key yields a Principal, which holds everything that the gateway needs without another query.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.errors import BadRequest, Forbidden, NotFound, Unauthenticated
from core.ids import KEY, MEMBER, new_id
from core.tenants import audit, key_bounds, key_routing, key_scopes, secrets
from core.tenants.key_scopes import KeyScopes
from core.tenants.limits import plan_of
from core.tenants.models import ApiKey, Member, Project, Tenant
from core.tenants.plans import Plan
from core.tenants.response_cache import CacheRule, rule_of
from core.tenants.roles import MEMBER_ROLES, lower_role, may_grant
from core.tenants.scope import TenantScope, scope_of_key

KEY_ROLES = MEMBER_ROLES
LONGEST_NAME = 120
UNPAID = "unpaid"


@dataclass(frozen=True, slots=True)
class Principal:
    """A verified key with its tenant and plan. Immutable; cacheable until the epoch changes."""

    scope: TenantScope
    tenant_name: str
    key_id: str
    project_id: str
    role: str
    scopes: KeyScopes
    allowed_ips: tuple[str, ...]
    expires_at: datetime | None
    plan: Plan
    currency: str
    settings: dict[str, Any] = field(hash=False)
    unpaid: bool = False  # an invoice is overdue for longer than the plan allows
    member_id: str | None = None  # the member who answers for the key; usage is shown by member
    # The first key of a chain of rotations: budgets, limits and policies are attached to it.
    origin_id: str = ""
    label_keys: tuple[str, ...] = ()  # of its project
    # The scope's, as a field: a request reads it some seventeen times.
    tenant_id: str = field(init=False, compare=False)
    cache_rule: CacheRule | None = field(init=False, compare=False)  # None: nothing is cached

    def __post_init__(self) -> None:
        object.__setattr__(self, "tenant_id", self.scope.tenant_id)
        object.__setattr__(self, "origin_id", self.origin_id or self.key_id)
        object.__setattr__(self, "cache_rule", rule_of(self.settings))


@dataclass(frozen=True, slots=True)
class IssuedKey:
    id: str
    secret: str  # returned only here; only its hash is stored


def issue(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    *,
    project_id: str,
    name: str,
    role: str = "developer",
    scopes: KeyScopes | None = None,
    allowed_ips: tuple[str, ...] = (),
    expires_at: datetime | None = None,
    routing: dict[str, Any] | None = None,
    service_account: bool = False,
) -> IssuedKey:
    """No member answers for the key of a service account: it works on without who made it."""
    check_role(scope, role)
    check_name(name)
    addresses = networks(allowed_ips)
    project = session.get(Project, project_id)
    if project is None or project.tenant_id != scope.tenant_id or project.archived_at is not None:
        raise NotFound(f"No project {project_id}.", next_step="List the projects.")
    key_routing.check(routing or {}, "routing")
    stored_scopes = (scopes or KeyScopes()).as_json()
    key_scopes.check(stored_scopes)
    key_bounds.check_issue(session, scope, stored_scopes, addresses, expires_at)
    secret = secrets.generate()
    key = ApiKey(
        id=new_id(KEY),
        tenant_id=scope.tenant_id,
        project_id=project_id,
        name=name,
        secret_sha256=secrets.digest(secret),
        last_four=secret[-4:],
        role=role,
        scopes=stored_scopes,
        allowed_ips=addresses,
        routing=routing or None,
        created_at=clock.now(),
        created_by=scope.actor,
        expires_at=expires_at,
        member_id=None if service_account else _answerable(session, scope),
    )
    session.add(key)
    session.flush()
    audit.record(session, scope, clock, "key.create", key.id, before=None, after=describe(key))
    return IssuedKey(key.id, secret)


def find(session: Session, secret: str, now: datetime) -> Principal:
    """Unauthenticated if the key is unknown or ended; Forbidden if its tenant is not active."""
    if not secrets.well_formed(secret):
        raise Unauthenticated("Incorrect API key.", next_step="Check it for a typo.")
    row = session.execute(
        _usable().where(ApiKey.secret_sha256 == secrets.digest(secret))
    ).one_or_none()
    if row is None:
        raise Unauthenticated("Incorrect API key.", next_step="Issue a key in the dashboard.")
    return _check_usable(session, *row, now)


def find_by_id(session: Session, key_id: str, now: datetime) -> Principal:
    """The current Principal of a key id, for work that a key submitted and that runs later."""
    row = session.execute(_usable().where(ApiKey.id == key_id)).one_or_none()
    if row is None:
        raise Unauthenticated("This API key no longer exists.", next_step="Use another key.")
    return _check_usable(session, *row, now)


def _usable() -> Select[ApiKey, Tenant, Member, list[str]]:
    """Keys of open projects, each with its tenant, the member who answers for it and its labels."""
    return (
        select(ApiKey, Tenant, Member, Project.label_keys)
        .join(Tenant, Tenant.id == ApiKey.tenant_id)
        .join(Project, Project.id == ApiKey.project_id)
        .outerjoin(Member, Member.id == ApiKey.member_id)
        .where(Project.archived_at.is_(None), Project.tenant_id == ApiKey.tenant_id)
    )


def _check_usable(
    session: Session,
    key: ApiKey,
    tenant: Tenant,
    member: Member | None,
    label_keys: list[str],
    now: datetime,
) -> Principal:
    if key.revoked_at is not None and key.revoked_at <= now:
        raise Unauthenticated("This API key was revoked.", next_step="Use another key.")
    if key.expires_at is not None and key.expires_at <= now:
        raise Unauthenticated("This API key has expired.", next_step="Use another key.")
    if member is not None and member.disabled_at is not None:
        raise Unauthenticated(
            "The member who answers for this API key is disabled.",
            next_step="Use a key of another member.",
        )
    if tenant.status not in ("active", UNPAID):
        raise Forbidden(f"This organisation is {tenant.status}.", next_step="Contact the operator.")
    return _principal(session, key, tenant, member, label_keys)


def is_live(key: ApiKey, now: datetime) -> bool:
    ends = _earliest(key.expires_at, key.revoked_at)
    return ends is None or ends > now


def revoke(session: Session, scope: TenantScope, clock: Clock, key_id: str) -> None:
    key = get(session, scope, key_id)
    if key.revoked_at is not None and key.revoked_at <= clock.now():
        return
    before = describe(key)
    key.revoked_at = clock.now()
    session.flush()
    audit.record(session, scope, clock, "key.revoke", key.id, before=before, after=describe(key))


def rotate(
    session: Session, scope: TenantScope, clock: Clock, key_id: str, *, overlap: timedelta
) -> IssuedKey:
    """Issue a new key with the same rights, and with what is attached to it; the old one stays valid
    for `overlap`."""
    if overlap < timedelta(0):
        raise BadRequest(
            f"The overlap must not be negative: {overlap}.",
            next_step="Use 0 or a positive time.",
            param="overlap",
        )
    old = get(session, scope, key_id)
    if old.revoked_at is not None or old.rotated_to is not None:
        raise BadRequest(
            f"Key {key_id} is already revoked or rotated.",
            next_step="Issue a new key instead.",
            param="key_id",
        )
    before = describe(old)
    new_key = issue(
        session,
        scope,
        clock,
        project_id=old.project_id,
        name=old.name,
        role=old.role,
        scopes=scopes_of(old.scopes),
        allowed_ips=tuple(old.allowed_ips),
        expires_at=old.expires_at,
        routing=old.routing,
    )
    successor = session.get_one(ApiKey, new_key.id)
    successor.origin_id, successor.member_id = old.first_id, old.member_id
    old.rotated_to = new_key.id
    old.revoked_at = clock.now() + overlap
    session.flush()
    audit.record(session, scope, clock, "key.rotate", old.id, before=before, after=describe(old))
    return new_key


def hand_over(session: Session, scope: TenantScope, clock: Clock, member_id: str) -> None:
    """The acting member answers from now on for the live keys of another, whose roles it may grant."""
    query = select(ApiKey).where(ApiKey.tenant_id == scope.tenant_id, ApiKey.member_id == member_id)
    for key in session.scalars(query.order_by(ApiKey.id)):
        if is_live(key, clock.now()):
            check_role(scope, key.role)
            before = describe(key)
            key.member_id = _answerable(session, scope)
            session.flush()
            audit.record(
                session, scope, clock, "key.hand_over", key.id, before=before, after=describe(key)
            )


def get(session: Session, scope: TenantScope, key_id: str) -> ApiKey:
    key = session.get(ApiKey, key_id)
    foreign = key is None or key.tenant_id != scope.tenant_id
    if foreign or (scope.project_id and key.project_id != scope.project_id):  # type: ignore[union-attr]
        raise NotFound(f"No key {key_id}.", next_step="List the keys.")
    return key  # type: ignore[return-value]


def all_of(session: Session, scope: TenantScope) -> list[ApiKey]:
    query = select(ApiKey).where(ApiKey.tenant_id == scope.tenant_id)
    if scope.project_id is not None:
        query = query.where(ApiKey.project_id == scope.project_id)
    return list(session.scalars(query.order_by(ApiKey.id)))


def current_names(session: Session, scope: TenantScope) -> dict[str, str]:
    """The name of the newest of each chain of rotations, by the id of the first."""
    return {key.first_id: key.name for key in all_of(session, scope)}


def describe(key: ApiKey) -> dict[str, Any]:
    """Public fields, for the API and the audit log; without the secret."""
    time_fields = ("created_at", "expires_at", "revoked_at", "last_used_at")
    times: dict[str, Any] = {
        name: moment.isoformat() if (moment := getattr(key, name)) else None for name in time_fields
    }
    plain = (
        *("id", "project_id", "name", "role", "scopes", "allowed_ips", "last_four", "rotated_to"),
        "member_id",
    )
    routing = {"routing": key.routing or {}, "origin_id": key.first_id}
    return {name: getattr(key, name) for name in plain} | routing | times


def models_of(key: ApiKey) -> str:
    """The models that the key may use, for a table."""
    allowed = scopes_of(key.scopes).models
    return "all" if allowed is None else ", ".join(sorted(allowed)) or "none"


def scopes_of(stored: dict[str, Any]) -> KeyScopes:
    return KeyScopes(**{name: frozenset(values) for name, values in stored.items()})


def address_allowed(allowed_ips: tuple[str, ...], address: str) -> bool:
    if not allowed_ips:
        return True
    try:
        client = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(client, "ipv4_mapped", None)
    return any((mapped or client) in ipaddress.ip_network(network) for network in allowed_ips)


def _principal(
    session: Session, key: ApiKey, tenant: Tenant, member: Member | None, label_keys: list[str]
) -> Principal:
    role = key.role if member is None else lower_role(key.role, member.role)
    return Principal(
        scope=scope_of_key(tenant.id, key.project_id, key.id, role),
        tenant_name=tenant.name,
        key_id=key.id,
        project_id=key.project_id,
        role=role,
        scopes=scopes_of(key.scopes),
        allowed_ips=tuple(key.allowed_ips),
        expires_at=_earliest(key.expires_at, key.revoked_at),
        plan=plan_of(session, tenant),
        currency=tenant.currency,
        settings={**tenant.settings, **(key.routing or {})},
        unpaid=tenant.status == UNPAID,
        member_id=key.member_id,
        origin_id=key.first_id,
        label_keys=tuple(label_keys),
    )


def _answerable(session: Session, scope: TenantScope) -> str | None:
    """The member who acts, or who answers for the key that acts."""
    if scope.actor.startswith(f"{MEMBER}_"):
        return scope.actor
    acting = session.get(ApiKey, scope.actor)
    return acting.member_id if acting is not None else None


def _earliest(one: datetime | None, other: datetime | None) -> datetime | None:
    known = [moment for moment in (one, other) if moment is not None]
    return min(known, default=None)


def check_role(scope: TenantScope, role: str) -> None:
    if role not in KEY_ROLES:
        raise BadRequest(f"Unknown role {role!r}; use one of {', '.join(KEY_ROLES)}.", param="role")
    if not may_grant(scope.role, role):
        raise Forbidden(
            f"The role {scope.role} may not issue or change a key with the role {role}.",
            next_step="Ask an owner of the organisation.",
        )


def check_name(name: str) -> str:
    if not 0 < len(name) <= LONGEST_NAME:
        raise BadRequest(
            f"The name has {len(name)} characters.",
            next_step=f"Give the key a name of 1 to {LONGEST_NAME} characters.",
            param="name",
        )
    return name


def networks(addresses: Iterable[str]) -> list[str]:
    """In canonical form. BadRequest for one that is neither an address nor a network."""
    return [str(_network(each)) for each in addresses]


def _network(address: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(address)
    except ValueError:
        raise BadRequest(
            f"{address!r} is not an IP address or network.",
            param="allowed_ips",
            next_step="Write 203.0.113.7 or 203.0.113.0/24.",
        ) from None
