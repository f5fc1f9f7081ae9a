"""The demo tenant of embedded mode, created at the first start and reused at later ones."""

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.tenants import keys
from core.tenants.models import ApiKey, Project, Tenant
from core.tenants.organisations import create_project, create_tenant
from core.tenants.scope import scope_of_operator

NAME = "demo"


@dataclass(frozen=True, slots=True)
class DemoTenant:
    tenant_id: str
    project_id: str
    key_id: str
    secret: str | None  # only when the key was created by this call


def ensure_demo_tenant(session: Session, clock: Clock) -> DemoTenant:
    """Get or create the demo organisation on the standard plan, its project and an owner key."""
    tenant = session.scalars(select(Tenant).where(Tenant.name == NAME)).one_or_none()
    if tenant is not None:
        return _existing(session, tenant, clock)
    tenant = create_tenant(session, clock, name=NAME, display_name="Demo", plan="standard")
    scope = scope_of_operator(tenant.id, "system")
    project = create_project(session, scope, clock, name="default")
    return _with_key(session, tenant, project, clock)


def _existing(session: Session, tenant: Tenant, clock: Clock) -> DemoTenant:
    project = session.scalars(
        select(Project).where(Project.tenant_id == tenant.id).order_by(Project.id)
    ).first()
    if project is None:
        scope = scope_of_operator(tenant.id, "system")
        project = create_project(session, scope, clock, name="default")
    key = session.scalars(
        select(ApiKey)
        .where(ApiKey.tenant_id == tenant.id, ApiKey.revoked_at.is_(None), ApiKey.role == "owner")
        .order_by(ApiKey.id)
    ).first()
    if key is None:
        return _with_key(session, tenant, project, clock)
    return DemoTenant(tenant.id, key.project_id, key.id, None)


def _with_key(session: Session, tenant: Tenant, project: Project, clock: Clock) -> DemoTenant:
    scope = scope_of_operator(tenant.id, "system")
    issued = keys.issue(
        session, scope, clock, project_id=project.id, name="demo owner", role="owner"
    )
    return DemoTenant(tenant.id, project.id, issued.id, issued.secret)
