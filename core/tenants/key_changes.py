"""Changes of an issued key: its name, what it may use, from where and until when, its routing."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from core.clock import Clock
from core.errors import BadRequest, Conflict
from core.tenants import audit, key_bounds, key_routing, key_scopes, keys
from core.tenants.models import ApiKey
from core.tenants.scope import TenantScope


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """None changes nothing. `scopes` and `routing` are merged by name; null removes a name."""

    name: str | None = None
    scopes: dict[str, Any] | None = None
    routing: dict[str, Any] | None = None
    allowed_ips: Sequence[str] | None = None  # none of them: any address
    expires_at: datetime | None = None
    no_end: bool = False  # the key does not expire


def change(
    session: Session, scope: TenantScope, clock: Clock, key_id: str, changed: KeyChange
) -> ApiKey:
    """A key may not widen its own bounds in another. Conflict if the key has ended."""
    key = keys.get(session, scope, key_id)
    keys.check_role(scope, key.role)
    now = clock.now()
    if not keys.is_live(key, now):
        raise Conflict(
            f"The key {key.name} has ended.", next_step="Issue a new key; an ended one stays so."
        )
    before = keys.describe(key)
    _bounds(session, scope, key, changed, now)
    if changed.name is not None:
        key.name = keys.check_name(changed.name)
    if changed.routing is not None:
        key_routing.check(changed.routing, "routing")
        merged = {**(key.routing or {}), **changed.routing}
        key.routing = {name: each for name, each in merged.items() if each is not None}
    session.flush()
    audit.record(
        session, scope, clock, "key.change", key.id, before=before, after=keys.describe(key)
    )
    return key


def _bounds(
    session: Session, scope: TenantScope, key: ApiKey, changed: KeyChange, now: datetime
) -> None:
    bounds = (changed.scopes, changed.allowed_ips, changed.expires_at, changed.no_end or None)
    if all(each is None for each in bounds):
        return
    merged = {**key.scopes, **(changed.scopes or {})}
    merged = {name: sorted(each) for name, each in merged.items() if each is not None}
    key_scopes.check(merged)
    addresses = key.allowed_ips
    if changed.allowed_ips is not None:
        addresses = keys.networks(changed.allowed_ips)
    if changed.expires_at is not None and changed.expires_at <= now:
        raise BadRequest(
            f"The end {changed.expires_at.isoformat()} is past.",
            next_step="Revoke the key to end it now.",
            param="expires_at",
        )
    ends = None if changed.no_end else changed.expires_at or key.expires_at
    key_bounds.check_issue(session, scope, merged, addresses, ends)
    key.scopes, key.allowed_ips, key.expires_at = merged, addresses, ends
