"""/admin/v1/limits and /plans: what a tenant's plan sets, and what is set beside it."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core.tenants import limits, organisations
from core.tenants.plans import PLANS, LimitRule, Plan, Scope, Unit
from gateway.api.admin.access import Allowed, Visit
from gateway.schemas.admin import NewLimit

router = APIRouter(prefix="/admin/v1", tags=["limits"])
Reads = Annotated[Visit, Depends(Allowed("limits", "read"))]
Writes = Annotated[Visit, Depends(Allowed("limits", "write"))]


@router.get("/plans")
def list_plans(visit: Reads) -> dict[str, Any]:
    return {"object": "list", "data": [_plan(plan) for plan in PLANS.values()]}


@router.get("/limits")
def list_limits(visit: Reads) -> dict[str, Any]:
    """What is in force, the tenant's own among it."""
    with visit.services.database.read() as session:
        tenant = organisations.get_tenant(session, visit.scope)
        own = limits.own_rules(session, visit.scope)
        plan = limits.plan_of(session, tenant)
    listed = [limits.describe(rule) | {"own": rule in own} for rule in plan.rules]
    return {"object": "list", "plan": plan.name, "data": listed}


@router.put("/limits")
def set_limit(body: NewLimit, visit: Writes) -> dict[str, Any]:
    rule = LimitRule(
        Scope(body.scope), Unit(body.unit), body.limit, body.period_s, body.target, body.shadow
    )
    with visit.services.database.transaction() as session:
        limits.set_rule(session, visit.scope, visit.services.clock, rule)
    return limits.describe(rule)


@router.delete("/limits")
def remove_limit(
    visit: Writes, scope: Scope, unit: Unit, period_s: int = 60, target: str = ""
) -> dict[str, Any]:
    """Back to what the plan says."""
    rule = LimitRule(scope, unit, 1, period_s, target)
    with visit.services.database.transaction() as session:
        limits.remove_rule(session, visit.scope, visit.services.clock, rule)
    return {"removed": rule.name, "target": target}


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "priority": plan.priority,
        "weight": plan.weight,
        "cached_token_weight": plan.cached_permille / 1000,
        "queue_wait_s": plan.queue_wait_s,
        "queue_length": plan.queue_length,
        "limits": [limits.describe(rule) for rule in plan.rules],
    }
