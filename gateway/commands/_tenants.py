"""Finds a tenant by name or id."""

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from core.errors import NotFound
from core.tenants.models import Tenant


def tenant_id_of(session: Session, named: str) -> str:
    found = session.scalar(select(Tenant.id).where(or_(Tenant.name == named, Tenant.id == named)))
    if found is None:
        raise NotFound(
            f"There is no tenant {named!r}.", next_step="List tenants with `tollhouse tenant list`."
        )
    return found
