"""/admin/v1/plans and /admin/v1/limits: plans, and limits of a tenant that override its plan."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core import storage
from core.tenants import limits, organisations, plan_store
from core.tenants.plans import LimitRule, Scope, Unit
from gateway.admin.access import AdminContext, OperatorContext, RequireOperator, RequirePermission
from gateway.admin.schemas import NewLimit, PlanBody

router = APIRouter(prefix="/admin/v1", tags=["limits"])
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("limits", "read"))]
OperatorAccess = Annotated[OperatorContext, Depends(RequireOperator("tenants", "write"))]
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("limits", "write"))]


@router.get("/plans")
def list_plans(ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        plans = plan_store.all_of(session)
    return {"object": "list", "data": [plan_store.describe(each) for each in plans.values()]}


@router.put("/plans/{name}")
def save_plan(name: str, body: PlanBody, ctx: OperatorAccess) -> dict[str, Any]:
    """Create or replace a plan. A change reaches its tenants within a second."""
    plan = plan_store.from_body(organisations.check_slug(name), body.model_dump())
    with ctx.database.transaction() as session:
        plan_store.save(session, ctx.clock, ctx.actor.id, plan)
    return plan_store.describe(plan)


@router.delete("/plans/{name}")
def remove_plan(name: str, ctx: OperatorAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        plan_store.remove(session, ctx.clock, ctx.actor.id, name)
    return {"removed": name}


@router.get("/limits")
def list_limits(ctx: ReadAccess) -> dict[str, Any]:
    """The limits in force: the plan's, and the tenant's own."""
    with ctx.database.read() as session:
        tenant = organisations.get_tenant(session, ctx.scope)
        own = limits.own_rules(session, ctx.scope)
        plan = limits.plan_of(session, tenant)
    listed = [limits.describe(rule) | {"own": rule in own} for rule in plan.rules]
    return {"object": "list", "plan": plan.name, "data": listed}


@router.get("/storage")
def show_storage(ctx: ReadAccess) -> dict[str, Any]:
    """What the API stores for the tenant, in bytes by kind, and its plan's quota."""
    with ctx.database.read() as session:
        tenant = organisations.get_tenant(session, ctx.scope)
        plan = limits.plan_of(session, tenant)
        used = storage.used(session, ctx.scope.tenant_id)
    return {
        "object": "storage",
        "quota_bytes": storage.quota_of(plan),
        "used_bytes": sum(used.values()),
        "used_by_kind": used,
    }


@router.put("/limits")
def set_limit(body: NewLimit, ctx: WriteAccess) -> dict[str, Any]:
    rule = LimitRule(
        Scope(body.scope), Unit(body.unit), body.limit, body.period_s, body.target, body.shadow
    )
    with ctx.database.transaction() as session:
        limits.set_rule(session, ctx.scope, ctx.clock, rule)
    return limits.describe(rule)


@router.delete("/limits")
def remove_limit(
    ctx: WriteAccess, scope: Scope, unit: Unit, period_s: int = 60, target: str = ""
) -> dict[str, Any]:
    """Remove the tenant's own limit; the plan's applies again."""
    rule = LimitRule(scope, unit, 1, period_s, target)
    with ctx.database.transaction() as session:
        limits.remove_rule(session, ctx.scope, ctx.clock, rule)
    return {"removed": rule.name, "target": target}
