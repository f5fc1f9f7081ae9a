"""Finds a tenant by name or id."""

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from core.errors import NotFound
from core.tenants.models import Tenant


def tenant_id_of(session: Session, name_or_id: str) -> str:
    tenant_id = session.scalar(
        select(Tenant.id).where(or_(Tenant.name == name_or_id, Tenant.id == name_or_id))
    )
    if tenant_id is None:
        raise NotFound(
            f"There is no tenant {name_or_id!r}.",
            next_step="List tenants with `tollhouse tenant list`.",
        )
    return tenant_id
