"""Keys: shown once, found by hash, bounded by time and place, rotated with an overlap."""

from datetime import timedelta

import pytest
from sqlalchemy import select

from core.clock import FakeClock
from core.database import Database
from core.errors import Forbidden, NotFound, Unauthenticated
from core.tenants import audit, keys, limits
from core.tenants.bootstrap import ensure_demo_tenant
from core.tenants.key_scopes import KeyScopes
from core.tenants.models import ApiKey, Tenant
from core.tenants.organisations import create_project, create_tenant
from core.tenants.plans import LimitRule, Scope, Unit
from core.tenants.scope import TenantScope, scope_of_operator


def _tenant(database: Database, clock: FakeClock, name: str) -> tuple[TenantScope, str]:
    with database.transaction() as session:
        scope = scope_of_operator(create_tenant(session, clock, name=name).id)
        return scope, create_project(session, scope, clock, name="default").id


def _issue(
    database: Database, clock: FakeClock, scope: TenantScope, project: str, **fields: object
) -> keys.IssuedKey:
    with database.transaction() as session:
        return keys.issue(
            session,
            scope,
            clock,
            project_id=project,
            name="k",
            **fields,  # type: ignore[arg-type]
        )


def _refused(database: Database, secret: str, clock: FakeClock) -> str:
    with database.read() as session, pytest.raises(Unauthenticated) as refused:
        keys.find(session, secret, clock.now())
    return refused.value.message


def test_the_demo_tenant_shows_its_key_on_the_first_start_only(
    database: Database, clock: FakeClock
) -> None:
    with database.transaction() as session:
        first = ensure_demo_tenant(session, clock)
    with database.transaction() as session:
        second = ensure_demo_tenant(session, clock)
    assert first.secret is not None and second.secret is None
    assert (first.tenant_id, first.key_id) == (second.tenant_id, second.key_id)
    with database.read() as session:
        principal = keys.find(session, first.secret, clock.now())
    assert (principal.role, principal.plan.name, principal.tenant_name) == (
        "owner",
        "standard",
        "demo",
    )


def test_the_secret_is_stored_nowhere(sqlite_database: Database, clock: FakeClock) -> None:
    scope, project = _tenant(sqlite_database, clock, "a")
    issued = _issue(sqlite_database, clock, scope, project)
    with sqlite_database.read() as session:
        rows = [vars(row) for row in session.scalars(select(ApiKey))]
        rows += [vars(row) for row in audit.entries(session, scope)]
    assert issued.secret not in str(rows)
    assert issued.secret[3:20] not in str(rows)


def test_a_key_ends_with_its_time_its_revocation_or_its_tenant(
    sqlite_database: Database, clock: FakeClock
) -> None:
    scope, project = _tenant(sqlite_database, clock, "a")
    until = clock.now() + timedelta(hours=1)
    short = _issue(sqlite_database, clock, scope, project, expires_at=until)
    other = _issue(sqlite_database, clock, scope, project)
    clock.advance(hours=1)
    assert "expired" in _refused(sqlite_database, short.secret, clock)
    with sqlite_database.transaction() as session:
        keys.revoke(session, scope, clock, other.id)
    assert "revoked" in _refused(sqlite_database, other.secret, clock)
    third = _issue(sqlite_database, clock, scope, project)
    with sqlite_database.transaction() as session:
        session.get_one(Tenant, scope.tenant_id).status = "suspended"
    with sqlite_database.read() as session, pytest.raises(Forbidden, match="suspended"):
        keys.find(session, third.secret, clock.now())


def test_rotation_overlaps_and_keeps_the_rights(
    sqlite_database: Database, clock: FakeClock
) -> None:
    scope, project = _tenant(sqlite_database, clock, "a")
    rights = KeyScopes(models=frozenset({"demo"}), routes=frozenset({"/v1/chat/*"}))
    old = _issue(sqlite_database, clock, scope, project, scopes=rights, role="viewer")
    with sqlite_database.transaction() as session:
        fresh = keys.rotate(session, scope, clock, old.id, overlap=timedelta(minutes=5))
    for secret in (old.secret, fresh.secret):
        with sqlite_database.read() as session:
            principal = keys.find(session, secret, clock.now())
        assert (principal.scopes, principal.role) == (rights, "viewer")
    clock.advance(minutes=5)
    assert "revoked" in _refused(sqlite_database, old.secret, clock)
    with sqlite_database.read() as session:
        assert keys.find(session, fresh.secret, clock.now()).key_id == fresh.id


def test_another_tenants_key_and_project_are_not_there(
    sqlite_database: Database, clock: FakeClock
) -> None:
    mine, _ = _tenant(sqlite_database, clock, "a")
    theirs, foreign_project = _tenant(sqlite_database, clock, "b")
    key = _issue(sqlite_database, clock, theirs, foreign_project)
    with sqlite_database.transaction() as session:
        with pytest.raises(NotFound):
            keys.revoke(session, mine, clock, key.id)
        with pytest.raises(NotFound):
            keys.issue(session, mine, clock, project_id=foreign_project, name="x")
        assert keys.all_of(session, mine) == []


@pytest.mark.parametrize(
    ("allowed", "address", "ok"),
    [
        ((), "198.51.100.1", True),
        (("203.0.113.0/24",), "203.0.113.9", True),
        (("203.0.113.0/24",), "203.0.114.9", False),
        (("203.0.113.7/32",), "::ffff:203.0.113.7", True),
        (("2001:db8::/32",), "2001:db8::1", True),
        (("203.0.113.0/24",), "not an address", False),
    ],
)
def test_addresses(allowed: tuple[str, ...], address: str, ok: bool) -> None:
    assert keys.address_allowed(allowed, address) is ok


def test_a_tenants_own_limit_replaces_its_plans(
    sqlite_database: Database, clock: FakeClock
) -> None:
    scope, project = _tenant(sqlite_database, clock, "a")
    issued = _issue(sqlite_database, clock, scope, project)
    mine = LimitRule(Scope.TENANT, Unit.REQUESTS, 7)
    with sqlite_database.transaction() as session:
        limits.set_rule(session, scope, clock, mine)
    with sqlite_database.read() as session:
        rules = keys.find(session, issued.secret, clock.now()).plan.rules
        assert [rule for rule in rules if rule.name == mine.name] == [mine]
        newest = audit.entries(session, scope)[0]
    assert (newest.action, newest.before, newest.after) == (
        "limit.set",
        None,
        limits.describe(mine),
    )
    with sqlite_database.transaction() as session:
        limits.remove_rule(session, scope, clock, mine)
    with sqlite_database.read() as session:
        rules = keys.find(session, issued.secret, clock.now()).plan.rules
    assert next(rule.limit for rule in rules if rule.name == mine.name) == 3000
