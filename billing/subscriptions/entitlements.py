"""The limits plan that a billing plan sets: rate limits and budgets follow the subscription.

Billing changes a tenant's limits plan only while it is the one that billing set last. An operator's other
choice therefore stays, until the operator chooses the plan of the subscription again.
"""

from datetime import datetime

from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from core.tenants import audit_chain
from core.tenants.models import AuditEntry, Tenant
from core.tenants.organisations import describe

ACTOR = "billing"


def follow(
    session: Session, account: BillingAccount, limits_plan: str | None, at: datetime
) -> bool:
    """Set the limits plan of the billing plan in force, None without one: then the plan of before
    returns. Returns whether the tenant's plan changed."""
    tenant = session.get(Tenant, account.tenant_id)
    if tenant is None or account.limits_set == limits_plan:
        return False
    begins = account.limits_set is None
    overridden = not begins and tenant.plan != account.limits_set
    if begins:
        account.limits_before = tenant.plan
    account.limits_set, wanted = limits_plan, limits_plan or account.limits_before
    if limits_plan is None:
        account.limits_before = None
    if overridden or wanted is None or wanted == tenant.plan:
        session.flush()
        return False
    before = describe(tenant)
    tenant.plan = wanted
    session.flush()
    audit_chain.append(
        session,
        AuditEntry(
            tenant_id=tenant.id,
            at=at,
            actor=ACTOR,
            action="tenant.change",
            target=tenant.id,
            before=before,
            after=describe(tenant),
        ),
    )
    return True
