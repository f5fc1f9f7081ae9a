"""Changes of the role policy by the operator. Audited; casbin reloads the policy on a new epoch."""

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.errors import BadRequest, NotFound
from core.tenants import audit
from core.tenants.models import PolicyRule
from core.tenants.roles import ACCOUNTANT, MEMBER_ROLES, OBJECTS, ensure_policy

_ACTS = ("read", "write", "*")


def list_rules(session: Session) -> list[dict[str, str]]:
    rows = session.scalars(select(PolicyRule).order_by(PolicyRule.id))
    return [_describe(row) for row in rows]


def grant(session: Session, clock: Clock, actor: str, role: str, obj: str, act: str) -> None:
    _check(role, obj, act)
    ensure_policy(session)
    if _find(session, role, obj, act) is not None:
        return
    highest = session.scalar(select(func.max(PolicyRule.id))) or 0
    session.add(PolicyRule(id=highest + 1, ptype="p", v0=role, v1=obj, v2=act))
    session.flush()
    after = {"right": f"{act} {obj}"}
    audit.record_operator(session, clock, actor, "role.grant", role, before=None, after=after)


def withdraw(session: Session, clock: Clock, actor: str, role: str, obj: str, act: str) -> None:
    _check(role, obj, act)
    row = _find(session, role, obj, act)
    if row is None:
        raise NotFound(
            f"The role {role} has no right of its own to `{act} {obj}`.",
            next_step="List the roles.",
        )
    session.execute(delete(PolicyRule).where(PolicyRule.id == row.id))
    before = {"right": f"{act} {obj}"}
    audit.record_operator(session, clock, actor, "role.withdraw", role, before=before, after=None)


def _find(session: Session, role: str, obj: str, act: str) -> PolicyRule | None:
    return session.scalars(
        select(PolicyRule).where(
            PolicyRule.ptype == "p",
            PolicyRule.v0 == role,
            PolicyRule.v1 == obj,
            PolicyRule.v2 == act,
        )
    ).first()


def _check(role: str, obj: str, act: str) -> None:
    """BadRequest for an unknown value. The operator's right cannot be changed."""
    for name, value, known in (
        ("role", role, (*MEMBER_ROLES, ACCOUNTANT)),
        ("obj", obj, OBJECTS),
        ("act", act, _ACTS),
    ):
        if value not in known:
            raise BadRequest(
                f"Unknown {name} {value!r}; use one of {', '.join(known)}.", param=name
            )


def _describe(row: PolicyRule) -> dict[str, str]:
    if row.ptype == "g":
        return {"kind": "inherits", "role": row.v0 or "", "from": row.v1 or ""}
    return {"kind": "right", "role": row.v0 or "", "obj": row.v1 or "", "act": row.v2 or ""}
