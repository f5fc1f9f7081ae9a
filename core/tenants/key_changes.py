"""Changes of an issued key: the models that it may use, its fallback chains and canaries."""

from typing import Any

from sqlalchemy.orm import Session

from core.clock import Clock
from core.tenants import audit, key_bounds, key_routing, key_scopes, keys
from core.tenants.models import ApiKey
from core.tenants.scope import TenantScope


def change(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    key_id: str,
    *,
    scopes: dict[str, Any] | None = None,
    routing: dict[str, Any] | None = None,
) -> ApiKey:
    """Both are merged by name; null removes a name. A key may not widen its own bounds in another."""
    key = keys.get(session, scope, key_id)
    keys.check_role(scope, key.role)
    before = keys.describe(key)
    if scopes is not None:
        merged = {**key.scopes, **scopes}
        merged = {name: sorted(each) for name, each in merged.items() if each is not None}
        key_scopes.check(merged)
        key_bounds.check_issue(session, scope, merged, key.allowed_ips, key.expires_at)
        key.scopes = merged
    if routing is not None:
        key_routing.check(routing, "routing")
        merged = {**(key.routing or {}), **routing}
        key.routing = {name: each for name, each in merged.items() if each is not None}
    session.flush()
    audit.record(
        session, scope, clock, "key.change", key.id, before=before, after=keys.describe(key)
    )
    return key
