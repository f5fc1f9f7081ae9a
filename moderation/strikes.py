"""Strikes: blocked requests count against their key, and too many suspend it by rule."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from core.clock import Clock
from core.database import insert_new
from core.errors import NotFound
from core.events import ModerationEvent
from core.tenants import attachments, audit, keys
from core.tenants.models import ApiKey
from core.tenants.scope import TenantScope
from moderation.models import Strike, Suspension
from moderation.policies import in_force

SUSPENDED_BY = "strike-rule"
LONGEST_WINDOW_HOURS = 24 * 90


def count_blocked(session: Session, events: Sequence[ModerationEvent]) -> int:
    """Store a strike for every blocked input, one per request. Returns how many were new."""
    rows = [
        {
            "request_id": event.request_id,
            "tenant_id": event.tenant_id,
            "key_id": event.key_id,
            "at": event.at,
            "category": (event.categories or ("",))[0][:64],
        }
        for event in events
        if event.action == "block" and event.direction == "input"
    ]
    return insert_new(session, Strike.__table__, rows, "request_id")  # type: ignore[arg-type]


def strikes_of(session: Session, key_id: str, clock: Clock, window_hours: int) -> int:
    """Return how many strikes count against a key and those that it was rotated from or to: inside the
    window, not voided, and after the last suspension was lifted."""
    since = clock.now() - timedelta(hours=window_hours)
    key = session.get(ApiKey, key_id)
    chain = attachments.ids_of_chain(session, key.first_id) if key is not None else [key_id]
    freed = session.scalar(
        select(func.max(Suspension.lifted_at)).where(Suspension.key_id.in_(chain))
    )
    query = select(func.count()).where(
        Strike.key_id.in_(chain),
        Strike.voided_at.is_(None),
        Strike.at > max(since, freed) if freed is not None else Strike.at > since,
    )
    return session.scalar(query) or 0


def apply_rules(
    session: Session, clock: Clock, scope_of: Callable[[str, str], TenantScope]
) -> list[str]:
    """Suspend every key that meets its policy's strike rule; returns their ids. A key that was rotated
    is suspended with its successor.

    `scope_of` makes an operator's scope from a tenant and an actor: only tasks may pass it.
    """
    since = clock.now() - timedelta(hours=LONGEST_WINDOW_HOURS)
    found = session.scalars(
        select(ApiKey)
        .join(Strike, Strike.key_id == ApiKey.id)
        .where(Strike.at > since, Strike.voided_at.is_(None))
    ).unique()
    suspended = []
    for first_id, tenant_id in {key.first_id: key.tenant_id for key in found}.items():
        scope = scope_of(tenant_id, SUSPENDED_BY)
        suspended += _suspend_if_due(session, scope, clock, first_id)
    return suspended


def _suspend_if_due(session: Session, scope: TenantScope, clock: Clock, first_id: str) -> list[str]:
    chain = attachments.chain_of(session, first_id)
    live = [key for key in chain if keys.is_live(key, clock.now())]
    if not live or live[-1].revoked_at is not None:
        return []
    current = live[-1]
    rule = in_force(session, scope, current.project_id, first_id).strikes
    if rule is None:
        return []
    count = strikes_of(session, current.id, clock, rule.window_hours)
    if count < rule.limit:
        return []
    for key in live:
        keys.revoke(session, scope, clock, key.id)
    suspension = Suspension(
        tenant_id=scope.tenant_id, key_id=current.id, at=clock.now(), strikes=count
    )
    session.add(suspension)
    session.flush()
    return [key.id for key in live]


def lift(session: Session, scope: TenantScope, clock: Clock, key_id: str) -> None:
    """Lift a key's suspension; earlier strikes no longer count."""
    suspension = session.scalars(
        select(Suspension)
        .where(
            Suspension.tenant_id == scope.tenant_id,
            Suspension.key_id == key_id,
            Suspension.lifted_at.is_(None),
        )
        .limit(1)
    ).first()
    if suspension is None:
        raise NotFound(f"Key {key_id} is not suspended.", next_step="List the suspensions.")
    key = keys.get(session, scope, key_id)
    before = keys.describe(key)
    key.revoked_at = None
    suspension.lifted_at = clock.now()
    suspension.lifted_by = scope.actor
    session.flush()
    audit.record(
        session, scope, clock, "key.unsuspend", key_id, before=before, after=keys.describe(key)
    )


def suspensions(session: Session, scope: TenantScope) -> list[Suspension]:
    """Return the tenant's present suspensions, newest first."""
    query = select(Suspension).where(
        Suspension.tenant_id == scope.tenant_id, Suspension.lifted_at.is_(None)
    )
    return list(session.scalars(query.order_by(Suspension.id.desc())))


def tenant_of(session: Session, key_id: str) -> str:
    """The tenant of a suspended key, for a reviewer, who has no tenant of their own."""
    found = session.scalar(
        select(Suspension.tenant_id).where(
            Suspension.key_id == key_id, Suspension.lifted_at.is_(None)
        )
    )
    if found is None:
        raise NotFound(f"Key {key_id} is not suspended.", next_step="List the suspensions.")
    return found


def describe(suspension: Suspension) -> dict[str, Any]:
    """The JSON form of a suspension in routes and commands."""
    return {
        "key_id": suspension.key_id,
        "at": suspension.at.isoformat(),
        "strikes": suspension.strikes,
    }


def void(session: Session, request_id: str, clock: Clock) -> None:
    """Void the strike of a request whose decision was wrong."""
    session.execute(
        update(Strike)
        .where(Strike.request_id == request_id, Strike.voided_at.is_(None))
        .values(voided_at=clock.now())
    )
