"""Plans of this deployment: the built-in ones, and those that the operator stored, which win."""

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
    "storage_mb",
)


def find(session: Session, name: str) -> Plan:
    row = session.get(PlanRow, name)
    if row is not None:
        return _plan(row)
    if name not in PLANS:
        known = ", ".join(sorted(all_of(session)))
        raise BadRequest(f"Unknown plan {name!r}; use one of {known}.", param="plan")
    return PLANS[name]


def all_of(session: Session) -> dict[str, Plan]:
    stored = {row.name: _plan(row) for row in session.scalars(select(PlanRow))}
    return PLANS | stored


def save(session: Session, clock: Clock, actor: str, plan: Plan) -> None:
    """Store a plan. It applies to its tenants within a second."""
    slots = [rule.slot for rule in plan.rules]
    if len(set(slots)) != len(slots) or any(rule.limit <= 0 for rule in plan.rules):
        raise BadRequest(
            "A limit of the plan is repeated or not positive.",
            next_step="Give each scope, unit and period once, with a limit above 0.",
            param="limits",
        )
    row = session.get(PlanRow, plan.name)
    before = describe(find(session, plan.name)) if row or plan.name in PLANS else None
    if row is None:
        row = PlanRow(name=plan.name, body={})
        session.add(row)
    row.body = describe(plan)
    session.flush()
    audit.record_operator(
        session, clock, actor, "plan.save", plan.name, before=before, after=row.body
    )


def remove(session: Session, clock: Clock, actor: str, name: str) -> None:
    """Delete a stored plan. A built-in plan is restored; any other must have no tenants."""
    row = session.get(PlanRow, name)
    if row is None:
        raise NotFound(f"There is no stored plan {name!r}.", next_step="List the plans.")
    users = session.scalar(select(func.count()).where(Tenant.plan == name))
    if users and name not in PLANS:
        raise Conflict(
            f"{users} tenants are on the plan {name}.", next_step="Move them to another plan first."
        )
    before = row.body
    session.execute(delete(PlanRow).where(PlanRow.name == name))
    audit.record_operator(session, clock, actor, "plan.remove", name, before=before, after=None)


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
    # A plan that was stored before a number existed has its default.
    return Plan(name, rules, **{each: body[each] for each in _NUMBERS if each in body})


def _plan(row: PlanRow) -> Plan:
    return from_body(row.name, row.body)
