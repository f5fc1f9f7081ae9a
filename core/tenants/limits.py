"""Limits of one tenant, in addition to those of its plan. Changes are audited."""

from dataclasses import replace
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.errors import BadRequest, Forbidden, NotFound
from core.tenants import attachments, audit, plan_store
from core.tenants.models import LimitRow, Tenant
from core.tenants.plans import LimitRule, Plan, Scope, Unit, with_rules
from core.tenants.roles import OPERATOR
from core.tenants.scope import TenantScope


def plan_of(session: Session, tenant: Tenant) -> Plan:
    """The tenant's plan, merged with its own rules."""
    rows = session.scalars(select(LimitRow).where(LimitRow.tenant_id == tenant.id))
    return with_rules(plan_store.find(session, tenant.plan), tuple(_rule(row) for row in rows))


def set_rule(session: Session, scope: TenantScope, clock: Clock, rule: LimitRule) -> None:
    if rule.limit <= 0:
        raise BadRequest(
            f"A limit must be positive, not {rule.limit}.",
            next_step="Give a number above 0, or delete the limit.",
            param="limit",
        )
    rule = _attached(session, scope, rule)
    row = _row(session, scope, rule)
    if scope.role != OPERATOR:
        _check_tenant_may_set(session, scope, rule, row)
    before = describe(_rule(row)) if row is not None else None
    if row is None:
        row = LimitRow(
            tenant_id=scope.tenant_id,
            scope=rule.scope,
            unit=rule.unit,
            period_s=rule.slot[2],
            target=rule.target,
        )
        session.add(row)
    row.limit_count = rule.limit
    row.shadow = rule.shadow
    row.by_operator = scope.role == OPERATOR
    session.flush()
    audit.record(session, scope, clock, "limit.set", rule.name, before=before, after=describe(rule))


def remove_rule(session: Session, scope: TenantScope, clock: Clock, rule: LimitRule) -> None:
    rule = _attached(session, scope, rule)
    row = _row(session, scope, rule)
    if row is None:
        raise NotFound(
            f"This tenant has no limit {rule.name} of its own.", next_step="List the limits."
        )
    if row.by_operator and scope.role != OPERATOR:
        raise _set_by_operator()
    before = describe(_rule(row))
    session.execute(delete(LimitRow).where(LimitRow.id == row.id))
    audit.record(session, scope, clock, "limit.remove", rule.name, before=before, after=None)


def own_rules(session: Session, scope: TenantScope) -> tuple[LimitRule, ...]:
    rows = session.scalars(
        select(LimitRow).where(LimitRow.tenant_id == scope.tenant_id).order_by(LimitRow.id)
    )
    return tuple(_rule(row) for row in rows)


def describe(rule: LimitRule) -> dict[str, Any]:
    return {
        "scope": rule.scope.value,
        "unit": rule.unit.value,
        "period_s": rule.slot[2],
        "target": rule.target,
        "limit": rule.limit,
        "shadow": rule.shadow,
    }


def _check_tenant_may_set(
    session: Session, scope: TenantScope, rule: LimitRule, row: LimitRow | None
) -> None:
    """A tenant may tighten the limits of its plan, but not loosen them or change the operator's."""
    if row is not None and row.by_operator:
        raise _set_by_operator()
    tenant = session.get_one(Tenant, scope.tenant_id)
    for other in plan_store.find(session, tenant.plan).rules:
        if other.slot == rule.slot and (rule.limit > other.limit or rule.shadow):
            raise Forbidden(
                f"The plan {tenant.plan} limits {rule.name} to {other.limit}.",
                next_step="Choose a lower limit, or ask the operator for another plan.",
            )


def _set_by_operator() -> Forbidden:
    return Forbidden(
        "This limit was set by the operator.", next_step="Ask the operator to change it."
    )


def _row(session: Session, scope: TenantScope, rule: LimitRule) -> LimitRow | None:
    return session.scalars(
        select(LimitRow).where(
            LimitRow.tenant_id == scope.tenant_id,
            LimitRow.scope == rule.scope,
            LimitRow.unit == rule.unit,
            LimitRow.period_s == rule.slot[2],
            LimitRow.target == rule.target,
        )
    ).one_or_none()


def _attached(session: Session, scope: TenantScope, rule: LimitRule) -> LimitRule:
    target = attachments.stored_target(session, scope, rule.scope, rule.target)
    return replace(rule, target=target)


def _rule(row: LimitRow) -> LimitRule:
    return LimitRule(
        Scope(row.scope), Unit(row.unit), row.limit_count, row.period_s, row.target, row.shadow
    )
