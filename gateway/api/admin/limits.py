"""/admin/v1/plans and /admin/v1/limits: plans, and limits of a tenant that override its plan."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core.tenants import limits, organisations, plan_store
from core.tenants.plans import LimitRule, Scope, Unit
from gateway.api.admin.access import Allowed, OperatorOnly, OperatorVisit, Visit
from gateway.schemas.admin import NewLimit, PlanBody

router = APIRouter(prefix="/admin/v1", tags=["limits"])
Reads = Annotated[Visit, Depends(Allowed("limits", "read"))]
Operator = Annotated[OperatorVisit, Depends(OperatorOnly("tenants", "write"))]
Writes = Annotated[Visit, Depends(Allowed("limits", "write"))]


@router.get("/plans")
def list_plans(visit: Reads) -> dict[str, Any]:
    with visit.services.database.read() as session:
        found = plan_store.all_of(session)
    return {"object": "list", "data": [plan_store.describe(each) for each in found.values()]}


@router.put("/plans/{name}")
def save_plan(name: str, body: PlanBody, visit: Operator) -> dict[str, Any]:
    """Create or replace a plan. A change reaches its tenants within a second."""
    plan = plan_store.from_body(organisations.check_slug(name), body.model_dump())
    with visit.services.database.transaction() as session:
        plan_store.save(session, visit.services.clock, visit.actor.id, plan)
    return plan_store.describe(plan)


@router.delete("/plans/{name}")
def remove_plan(name: str, visit: Operator) -> dict[str, Any]:
    with visit.services.database.transaction() as session:
        plan_store.remove(session, visit.services.clock, visit.actor.id, name)
    return {"removed": name}


@router.get("/limits")
def list_limits(visit: Reads) -> dict[str, Any]:
    """The limits in force: the plan's, and the tenant's own."""
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
    """Remove the tenant's own limit; the plan's applies again."""
    rule = LimitRule(scope, unit, 1, period_s, target)
    with visit.services.database.transaction() as session:
        limits.remove_rule(session, visit.scope, visit.services.clock, rule)
    return {"removed": rule.name, "target": target}
