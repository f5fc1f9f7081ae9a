"""Authorisation: checks an actor's act on a tenant and returns a TenantScope, or raises.

A tenant that the actor may not see is NotFound rather than Forbidden, so that names and ids cannot be
probed.
"""

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.errors import Forbidden, NotFound
from core.tenants.models import Tenant
from core.tenants.roles import OPERATOR, OPERATOR_ROLES, Roles
from core.tenants.scope import TenantScope, scope_of_key, scope_of_member, scope_of_operator

# Keys with these roles act for the whole tenant, others for their own project.
_WHOLE_TENANT = ("owner", "admin", "finance")


@dataclass(frozen=True, slots=True)
class Actor:
    """The authenticated caller. `tenant_id` is None only for operators."""

    id: str  # member id, key id, "operator", or "operator:" and the name of a named operator
    role: str
    tenant_id: str | None
    project_id: str | None = None  # set for an API key

    @property
    def is_operator(self) -> bool:
        return self.role in OPERATOR_ROLES and self.tenant_id is None


THE_OPERATOR = Actor("operator", OPERATOR, None)


def authorise(
    session: Session, roles: Roles, actor: Actor, tenant: str | None, obj: str, act: str
) -> TenantScope:
    """`tenant` is an id or a name; None is the actor's own tenant. NotFound or Forbidden."""
    roles.refresh(session)
    tenant_id = _tenant_id(session, actor, tenant)
    if not roles.allows(actor.role, actor.tenant_id, tenant_id, obj, act):
        raise _forbidden(actor, obj, act)
    return scope_for(actor, tenant_id)


def authorise_operator(session: Session, roles: Roles, actor: Actor, obj: str, act: str) -> None:
    """For objects that belong to no tenant. Forbidden if the actor is no operator."""
    roles.refresh(session)
    if not actor.is_operator or not roles.allows(actor.role, None, "", obj, act):
        raise _forbidden(actor, obj, act)


def scope_for(actor: Actor, tenant_id: str) -> TenantScope:
    """The scope of an actor after its right to this tenant was checked. NotFound if it has none."""
    if actor.is_operator:
        return scope_of_operator(tenant_id, actor.id, actor.role)
    if actor.tenant_id != tenant_id:
        raise NotFound(f"No tenant {tenant_id}.", next_step="Leave the tenant out to use your own.")
    if actor.project_id is not None and actor.role not in _WHOLE_TENANT:
        return scope_of_key(tenant_id, actor.project_id, actor.id, actor.role)
    return scope_of_member(tenant_id, actor.id, actor.role)


def _tenant_id(session: Session, actor: Actor, tenant: str | None) -> str:
    if tenant is None:
        if actor.tenant_id is None:
            raise NotFound("No tenant is given.", next_step="Add `?tenant=<id or name>`.")
        return actor.tenant_id
    existing_id = session.scalar(
        select(Tenant.id).where((Tenant.id == tenant) | (Tenant.name == tenant))
    )
    if existing_id is None or (not actor.is_operator and existing_id != actor.tenant_id):
        raise NotFound(f"No tenant {tenant}.", next_step="Leave the tenant out to use your own.")
    return existing_id


def _forbidden(actor: Actor, obj: str, act: str) -> Forbidden:
    return Forbidden(
        f"The role {actor.role} does not permit {act} on {obj}.",
        next_step="Ask an owner or an admin of your organisation, or the operator.",
    )
