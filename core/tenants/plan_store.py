"""Plans of this house: those of the code, replaced or joined by what the operator stored."""

from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.errors import BadRequest, Conflict, NotFound
from core.tenants import audit
from core.tenants.models import PlanRow, Tenant
from core.tenants.plans import PLANS, LimitRule, Plan, Scope, Unit

_NUMBERS = (
    "priority",
    "weight",
    "cached_permille",
    "queue_wait_s",
    "queue_length",
    "expected_output",
)


def find(session: Session, name: str) -> Plan:
    row = session.get(PlanRow, name)
    if row is not None:
        return _plan(row)
    if name not in PLANS:
        known = ", ".join(sorted(all_of(session)))
        raise BadRequest(f"No plan {name!r}: one of {known}.", param="plan")
    return PLANS[name]


def all_of(session: Session) -> dict[str, Plan]:
    stored = {row.name: _plan(row) for row in session.scalars(select(PlanRow))}
    return PLANS | stored


def save(session: Session, clock: Clock, actor: str, plan: Plan) -> None:
    """Every tenant on it has it within a second."""
    slots = [rule.slot for rule in plan.rules]
    if len(set(slots)) != len(slots) or any(rule.limit <= 0 for rule in plan.rules):
        raise BadRequest(
            "A plan has each limit once, above zero.", next_step="Correct it.", param="limits"
        )
    row = session.get(PlanRow, plan.name)
    before = describe(find(session, plan.name)) if row or plan.name in PLANS else None
    if row is None:
        row = PlanRow(name=plan.name, body={})
        session.add(row)
    row.body = describe(plan)
    session.flush()
    audit.record_house(session, clock, actor, "plan.save", plan.name, before, row.body)


def remove(session: Session, clock: Clock, actor: str, name: str) -> None:
    """A plan of the code is as it was; another must have no tenant on it."""
    row = session.get(PlanRow, name)
    if row is None:
        raise NotFound(f"No plan {name!r} was stored.", next_step="List the plans.")
    users = session.scalar(select(func.count()).where(Tenant.plan == name))
    if users and name not in PLANS:
        raise Conflict(f"{users} tenants are on the plan {name}.", next_step="Move them first.")
    before = row.body
    session.execute(delete(PlanRow).where(PlanRow.name == name))
    audit.record_house(session, clock, actor, "plan.remove", name, before, None)


def describe(plan: Plan) -> dict[str, Any]:
    rules = [
        {
            "scope": rule.scope.value,
            "unit": rule.unit.value,
            "limit": rule.limit,
            "period_s": rule.slot[2],
            "shadow": rule.shadow,
        }
        for rule in plan.rules
    ]
    return {"name": plan.name, "limits": rules} | {each: getattr(plan, each) for each in _NUMBERS}


def from_body(name: str, body: dict[str, Any]) -> Plan:
    rules = tuple(
        LimitRule(
            Scope(each["scope"]),
            Unit(each["unit"]),
            each["limit"],
            each["period_s"],
            shadow=each["shadow"],
        )
        for each in body["limits"]
    )
    return Plan(name, rules, **{each: body[each] for each in _NUMBERS})


def _plan(row: PlanRow) -> Plan:
    return from_body(row.name, row.body)
