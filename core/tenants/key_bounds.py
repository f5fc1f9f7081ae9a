"""What a key may hand on: no wider scope, no other addresses and no longer life than its own.

A change that a member or the operator makes is not bounded here.
"""

import ipaddress
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from core.errors import Forbidden
from core.tenants.key_scopes import covers
from core.tenants.models import ApiKey
from core.tenants.scope import TenantScope


def check_issue(
    session: Session,
    scope: TenantScope,
    scopes: dict[str, Any],
    networks: list[str],
    expires_at: datetime | None,
) -> None:
    """Forbidden, with the bound, if the acting key would issue a key that may do more."""
    parent = session.get(ApiKey, scope.actor)
    if parent is None:
        return
    for name, own in parent.scopes.items():
        given = scopes.get(name)
        if given is None or not all(_covered(name, value, own) for value in given):
            raise _forbidden(f"scopes.{name}", f"a subset of {', '.join(sorted(own)) or 'nothing'}")
    if parent.allowed_ips and not (networks and _inside(networks, parent.allowed_ips)):
        raise _forbidden("allowed_ips", f"addresses in {', '.join(parent.allowed_ips)}")
    ends = min((at for at in (parent.expires_at, parent.revoked_at) if at), default=None)
    if ends is not None and (expires_at is None or expires_at > ends):
        raise _forbidden("expires_at", f"{ends.isoformat()} or earlier")


def check_unrestricted(session: Session, scope: TenantScope) -> None:
    """Forbidden for a key with any bound: a member that it added could issue a key without it."""
    parent = session.get(ApiKey, scope.actor)
    if parent is None:
        return
    for name, bound in (
        ("scopes", parent.scopes),
        ("addresses", parent.allowed_ips),
        ("an end", parent.expires_at or parent.revoked_at),
    ):
        if bound:
            raise Forbidden(
                f"This key has {name}, so it cannot change members, who would not be bound by it.",
                next_step="Use a key without scopes, addresses and end, or the dashboard.",
            )


def _covered(name: str, value: str, own: Iterable[str]) -> bool:
    if name != "routes":
        return value in own
    return any(covers(each, value) for each in own)


def _inside(networks: list[str], own: list[str]) -> bool:
    outer = [ipaddress.ip_network(each) for each in own]
    return all(
        any(inner.version == each.version and inner.subnet_of(each) for each in outer)  # type: ignore[arg-type]
        for inner in map(ipaddress.ip_network, networks)
    )


def _forbidden(field: str, bound: str) -> Forbidden:
    return Forbidden(
        f"A key cannot issue a key that may do more than itself: {field}.",
        next_step=f"Set {field} to {bound}, or issue the key in the dashboard.",
        param=field,
    )
