"""A key cannot issue or rotate a key that may do more, or for longer, than it may itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from core.clock import FakeClock
from core.database import Database
from core.errors import Forbidden
from core.tenants import keys, members, organisations, passwords
from core.tenants.access import Actor, scope_for
from core.tenants.key_scopes import KeyScopes
from core.tenants.scope import TenantScope, scope_of_operator

HASH = passwords.hash_password("correct horse battery")


@dataclass
class Issuer:
    session: Session
    clock: FakeClock
    scope: TenantScope
    project: str

    def issue(self, by: TenantScope | None = None, **fields: Any) -> str:
        fields = {"project_id": self.project, "name": "k", "role": "owner"} | fields
        return keys.issue(self.session, by or self.scope, self.clock, **fields).id

    def acting(self, key_id: str) -> TenantScope:
        key = keys.get(self.session, self.scope, key_id)
        actor = Actor(key.id, key.role, key.tenant_id, key.project_id)
        return scope_for(actor, key.tenant_id)


@pytest.fixture
def issuer(database: Database, clock: FakeClock) -> Iterator[Issuer]:
    with database.transaction() as session:
        tenant = organisations.create_tenant(session, clock, name="acme")
        scope = scope_of_operator(tenant.id)
        project = organisations.create_project(session, scope, clock, name="a").id
        yield Issuer(session, clock, scope, project)


NARROW = KeyScopes(models=frozenset({"small"}), routes=frozenset({"/v1/*", "/admin/v1/keys"}))


@pytest.mark.parametrize(
    ("field", "scopes"),
    [
        ("scopes.models", None),
        ("scopes.models", KeyScopes(routes=frozenset({"/v1/models"}))),
        ("scopes.models", KeyScopes(frozenset({"small", "large"}), None, frozenset({"/v1/*"}))),
        ("scopes.routes", KeyScopes(models=frozenset({"small"}))),
        ("scopes.routes", KeyScopes(frozenset({"small"}), None, frozenset({"/*"}))),
        ("scopes.routes", KeyScopes(frozenset({"small"}), None, frozenset({"/admin/v1/keys/*"}))),
    ],
)
def test_a_restricted_key_issues_no_wider_key(
    issuer: Issuer, field: str, scopes: KeyScopes | None
) -> None:
    parent = issuer.acting(issuer.issue(scopes=NARROW))
    with pytest.raises(Forbidden, match=field):
        issuer.issue(parent, scopes=scopes)


def test_a_restricted_key_issues_an_equal_and_a_narrower_key(issuer: Issuer) -> None:
    parent = issuer.acting(issuer.issue(scopes=NARROW))
    assert issuer.issue(parent, scopes=NARROW)
    narrower = KeyScopes(frozenset({"small"}), frozenset({"a"}), frozenset({"/v1/chat/*"}))
    assert issuer.issue(parent, scopes=narrower)


def test_a_key_issues_no_key_that_outlives_it(issuer: Issuer) -> None:
    ends = issuer.clock.now() + timedelta(days=1)
    parent = issuer.acting(issuer.issue(expires_at=ends))
    for later in (None, ends + timedelta(seconds=1)):
        with pytest.raises(Forbidden, match="expires_at"):
            issuer.issue(parent, expires_at=later)
    assert issuer.issue(parent, expires_at=ends)


def test_a_rotated_key_issues_none_beyond_its_overlap(issuer: Issuer) -> None:
    first = issuer.issue()
    keys.rotate(issuer.session, issuer.scope, issuer.clock, first, overlap=timedelta(hours=1))
    with pytest.raises(Forbidden, match="expires_at"):
        issuer.issue(issuer.acting(first))


@pytest.mark.parametrize("allowed_ips", [(), ("0.0.0.0/0",), ("10.0.0.7", "10.1.0.0/16"), ("::1",)])
def test_a_key_issues_no_key_for_other_addresses(
    issuer: Issuer, allowed_ips: tuple[str, ...]
) -> None:
    parent = issuer.acting(issuer.issue(allowed_ips=("10.0.0.0/24",)))
    with pytest.raises(Forbidden, match="allowed_ips"):
        issuer.issue(parent, allowed_ips=allowed_ips)
    assert issuer.issue(parent, allowed_ips=("10.0.0.8/31",))


def test_a_restricted_key_cannot_rotate_an_unrestricted_one_to_get_its_secret(
    issuer: Issuer,
) -> None:
    free = issuer.issue()
    parent = issuer.acting(issuer.issue(scopes=NARROW))
    with pytest.raises(Forbidden, match="scopes"):
        keys.rotate(issuer.session, parent, issuer.clock, free, overlap=timedelta(0))
    own = parent.actor
    assert keys.rotate(issuer.session, parent, issuer.clock, own, overlap=timedelta(0)).secret


def test_a_restricted_key_cannot_add_a_member_who_could(issuer: Issuer) -> None:
    parent = issuer.acting(issuer.issue(scopes=NARROW))
    fields = {"email": "me@acme.example", "role": "owner", "password_hash": HASH}
    with pytest.raises(Forbidden, match="cannot change members"):
        members.add(issuer.session, parent, issuer.clock, **fields)
    made = members.add(issuer.session, issuer.scope, issuer.clock, **fields)
    with pytest.raises(Forbidden, match="cannot change members"):
        members.set_password(issuer.session, parent, issuer.clock, made.id, HASH)
