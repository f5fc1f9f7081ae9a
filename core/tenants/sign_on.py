"""Single sign-on: which member an issuer's subject may sign in as.

A subject is linked to a member by an invitation, whose token only the invited person gets, or by a
verified e-mail address of a domain that the operator has recorded as the tenant's own. An address
alone links nothing, because any tenant may add any address as a member.
"""

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.errors import BadRequest, Conflict, NotFound, Unauthenticated
from core.tenants import audit, invitations, members, sessions, sign_on_connections
from core.tenants.access import Actor, scope_for
from core.tenants.models import Member, Tenant, TenantDomain
from core.tenants.scope import TenantScope

_ACTOR = "single sign-on"  # of members that it adds


@dataclass(frozen=True, slots=True)
class ExternalIdentity:
    """What the issuer's ID token proved, and what the sign-in was started with."""

    subject: str  # issuer and subject, unique over all issuers
    email: str  # empty if the issuer has not verified it
    invitation: str = ""  # a token of `invitations.invite`
    tenant: str = ""  # name or id, to choose among several memberships
    name: str = ""
    connection: str = ""  # the tenant whose own issuer it was; empty: the deployment's
    test: bool = False  # whether only the connection is tested


def authenticate(session: Session, clock: Clock, identity: ExternalIdentity) -> Member:
    """The member of an invitation, else a linked member, else one of a domain of its tenant."""
    found: Member | None
    if identity.invitation:
        found = _accept(session, clock, identity)
    elif identity.connection:
        found = _of_connection(session, clock, identity)
    else:
        found = _linked(session, identity) or _of_own_domain(session, identity)
        if found is not None:
            sign_on_connections.require_other_way(session, found.tenant_id, found.id)
    if found is None:
        raise Unauthenticated(
            f"{identity.email or 'This account'} is not linked to a member.",
            next_step="Open the invitation link that an admin of your organisation sends you.",
            code="not_a_member",
        )
    found.oidc_subject = identity.subject
    found.last_seen_at = clock.now()
    return found


def _accept(session: Session, clock: Clock, identity: ExternalIdentity) -> Member:
    member = invitations.member_of(session, clock, identity.invitation)
    if identity.connection not in ("", member.tenant_id):
        raise Unauthenticated(
            "The invitation is of another organisation.",
            next_step="Open its link again.",
            code="not_a_member",
        )
    if not identity.connection:
        sign_on_connections.require_other_way(session, member.tenant_id, member.id)
    other = select(Member.id).where(
        Member.tenant_id == member.tenant_id,
        Member.oidc_subject == identity.subject,
        Member.id != member.id,
    )
    if session.scalar(other) is not None:
        raise Unauthenticated(
            "This account is already linked to another member of the organisation.",
            next_step="Sign in without the invitation, or with another account.",
            code="already_linked",
        )
    if member.oidc_subject not in (None, identity.subject):
        sessions.revoke_all(session, clock, member.id)
    # Who saw the link may have linked an account of their own.
    if member.oidc_subject != identity.subject or member.invitation_by is None:
        member.oidc_by = member.invitation_by
    invitations.use(member)
    return member


def _linked(session: Session, identity: ExternalIdentity) -> Member | None:
    """Of several memberships the one of `tenant`, or the one that signed in last."""
    query = invitations.active().where(Member.oidc_subject == identity.subject)
    if identity.tenant:
        query = query.where((Tenant.id == identity.tenant) | (Tenant.name == identity.tenant))
    return session.scalars(
        query.order_by(Member.last_seen_at.desc().nulls_last(), Member.id)
    ).first()


def _of_connection(session: Session, clock: Clock, identity: ExternalIdentity) -> Member | None:
    """A member of the connection's tenant: the linked one, one of the same address, or a new one."""
    tenant_id = identity.connection
    own = invitations.active().where(Member.tenant_id == tenant_id)
    linked = session.scalars(own.where(Member.oidc_subject == identity.subject)).first()
    if linked is not None:
        return linked
    email = identity.email.strip().lower()
    domain = session.get(TenantDomain, email.rpartition("@")[2]) if email else None
    if domain is None or domain.tenant_id != tenant_id:
        return None
    known = session.scalars(
        select(Member).where(Member.tenant_id == tenant_id, Member.email == email)
    ).first()
    connection = sign_on_connections.of_tenant(session, tenant_id)
    if known is not None and connection is not None:
        # Another account of this issuer is another person; one of an earlier issuer is replaced.
        same = (known.oidc_subject or "").startswith(f"{connection.issuer}#")
        return known if known.disabled_at is None and not same else None
    tenant = session.get(Tenant, tenant_id)
    if connection is None or connection.new_member_role is None or tenant is None:
        return None
    if tenant.status == "closed":
        return None
    scope = scope_for(Actor(_ACTOR, "owner", tenant_id), tenant_id)
    role, name = connection.new_member_role, identity.name
    return members.add(session, scope, clock, email=email, role=role, name=name)


def _of_own_domain(session: Session, identity: ExternalIdentity) -> Member | None:
    email = identity.email.strip().lower()
    query = (
        invitations.active()
        .join(TenantDomain, TenantDomain.tenant_id == Tenant.id)
        .where(
            TenantDomain.domain == email.rpartition("@")[2],
            Member.email == email,
            Member.oidc_subject.is_(None),
        )
    )
    return session.scalars(query).first()


def add_domain(session: Session, scope: TenantScope, clock: Clock, domain: str) -> None:
    """Record that the tenant owns an e-mail domain. A domain belongs to one tenant at most."""
    name = domain.strip().lower()
    if "." not in name or "@" in name or len(name) > 253:
        raise BadRequest(f"{domain[:80]!r} is not a domain.", param="domain")
    row = session.get(TenantDomain, name)
    if row is not None and row.tenant_id != scope.tenant_id:
        raise Conflict(
            f"{name} is recorded for another tenant.",
            next_step="Remove it there first: `tollhouse tenant domain-remove`.",
            param="domain",
        )
    if row is None:
        session.add(TenantDomain(domain=name, tenant_id=scope.tenant_id, proved_at=clock.now()))
        session.flush()
        audit.record(session, scope, clock, "domain.add", name, before=None, after={"domain": name})


def remove_domain(session: Session, scope: TenantScope, clock: Clock, domain: str) -> None:
    """Members that are linked already stay linked."""
    row = session.get(TenantDomain, domain.strip().lower())
    if row is None or row.tenant_id != scope.tenant_id:
        raise NotFound(f"The tenant has no domain {domain}.", next_step="List its domains.")
    session.delete(row)
    audit.record(
        session,
        scope,
        clock,
        "domain.remove",
        row.domain,
        before={"domain": row.domain},
        after=None,
    )


def domains(session: Session, scope: TenantScope) -> list[TenantDomain]:
    query = select(TenantDomain).where(TenantDomain.tenant_id == scope.tenant_id)
    return list(session.scalars(query.order_by(TenantDomain.domain)))
