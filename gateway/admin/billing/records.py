"""What the operator's billing routes share: tenants by name, and the audit log."""

from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from billing.accounts import accounts
from core.errors import NotFound
from core.tenants.models import AuditEntry, Tenant
from gateway.admin.access import OperatorContext


def tenant_id_of(session: Session, name_or_id: str) -> str:
    result = session.scalar(
        select(Tenant.id).where(or_(Tenant.name == name_or_id, Tenant.id == name_or_id))
    )
    if result is None:
        raise NotFound(f"There is no tenant {name_or_id!r}.", next_step="GET /admin/v1/tenants")
    return result


def account_of(session: Session, ctx: OperatorContext, name_or_id: str) -> str:
    """The tenant's id. Opens its billing account if it has none."""
    tenant_id = tenant_id_of(session, name_or_id)
    accounts.ensure_account(session, tenant_id, ctx.clock.now())
    return tenant_id


def record(
    session: Session,
    ctx: OperatorContext,
    tenant_id: str,
    action: str,
    target: str,
    after: dict[str, Any],
) -> None:
    """Write to the audit log of the tenant concerned, in the same transaction."""
    session.add(
        AuditEntry(
            tenant_id=tenant_id or None,
            at=ctx.clock.now(),
            actor=ctx.actor.id,
            action=action,
            target=target,
            before=None,
            after=after,
        )
    )
