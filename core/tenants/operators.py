"""Named operators: people who run the deployment or keep its books, each with a token of their own.

The deployment's own token is one person too; where two must agree, the second needs a name.
"""

import re
import secrets
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.errors import BadRequest, Conflict, NotFound, Unauthenticated
from core.tenants import audit
from core.tenants.access import Actor
from core.tenants.models import Operator
from core.tenants.roles import OPERATOR_ROLES
from core.tenants.secrets import digest

_PREFIX = "tho_"
_NAME = re.compile(r"[a-z][a-z0-9.-]{0,29}")


def add(session: Session, clock: Clock, actor: str, name: str, role: str) -> tuple[Operator, str]:
    """Returns the operator and the token, which is not stored."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name[:40]!r} is not a name of an operator.",
            next_step="Use up to 30 lower-case letters, digits, dots and hyphens, a letter first.",
            param="name",
        )
    if role not in OPERATOR_ROLES:
        raise BadRequest(
            f"Unknown role {role!r}; use one of {', '.join(OPERATOR_ROLES)}.", param="role"
        )
    if session.get(Operator, name) is not None:
        raise Conflict(
            f"There is an operator {name!r} already.",
            next_step="Choose another name; a disabled operator keeps its own in the audit log.",
            param="name",
        )
    secret = _PREFIX + secrets.token_urlsafe(32)
    created = Operator(
        name=name,
        role=role,
        secret_sha256=digest(secret),
        created_at=clock.now(),
        created_by=actor,
    )
    session.add(created)
    session.flush()
    audit.record_operator(
        session, clock, actor, "operator.add", name, before=None, after=describe(created)
    )
    return created, secret


def disable(session: Session, clock: Clock, actor: str, name: str) -> Operator:
    """The token and all sessions end at once."""
    found = session.get(Operator, name)
    if found is None:
        raise NotFound(
            f"There is no operator {name!r}.", next_step="List them: tollhouse operator list"
        )
    if found.disabled_at is None:
        before = describe(found)
        found.disabled_at = clock.now()
        session.flush()
        audit.record_operator(
            session, clock, actor, "operator.disable", name, before=before, after=describe(found)
        )
    return found


def everyone(session: Session) -> list[Operator]:
    return list(session.scalars(select(Operator).order_by(Operator.name)))


def is_token(secret: str) -> bool:
    return secret.startswith(_PREFIX)


def find(session: Session, secret: str) -> Operator:
    """By the token. Unauthenticated if it is wrong or the operator is disabled."""
    query = select(Operator).where(Operator.secret_sha256 == digest(secret))
    found = session.scalar(query)
    if found is None or found.disabled_at is not None:
        raise Unauthenticated(
            "This operator's token is unknown, or its operator is disabled.",
            next_step="Ask another operator for a new one: tollhouse operator add",
        )
    return found


def actor_of(operator: Operator) -> Actor:
    return Actor(f"operator:{operator.name}", operator.role, None)


def actor_named(session: Session, name: str) -> Actor | None:
    """None if the operator is disabled."""
    found = session.get(Operator, name)
    return None if found is None or found.disabled_at is not None else actor_of(found)


def describe(operator: Operator) -> dict[str, Any]:
    ended = operator.disabled_at
    return {
        "name": operator.name,
        "role": operator.role,
        "created_at": operator.created_at.isoformat(),
        "created_by": operator.created_by,
        "disabled_at": ended.isoformat() if ended else None,
    }
