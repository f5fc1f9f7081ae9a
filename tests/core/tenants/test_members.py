"""Members and their sessions: argon2 passwords, revocable sign-ins, single sign-on identities."""

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import argon2
import pytest
from sqlalchemy import select

from core.clock import FakeClock
from core.counters_memory import MemoryCounters
from core.database import Database
from core.errors import BadRequest, Conflict, Forbidden, RateLimited, Unauthenticated
from core.tenants import audit, invitations, keys, members, passwords, sessions, sign_on
from core.tenants.access import Actor, scope_for
from core.tenants.key_scopes import KeyScopes
from core.tenants.models import DashboardSession, Member, Tenant
from core.tenants.organisations import change_tenant, create_project, create_tenant
from core.tenants.roles import Roles
from core.tenants.scope import TenantScope, scope_of_operator
from gateway.edge.auth.attempts import FailedAttempts
from gateway.edge.auth.dashboard_auth import DashboardAuth
from tests.conftest import hasher_of_the_product

PASSWORD = "correct horse battery"
HASH = passwords.hash_password(PASSWORD)
TOKEN = "an operator's token of a test"


@pytest.fixture
def scope(sqlite_database: Database, clock: FakeClock) -> TenantScope:
    with sqlite_database.transaction() as session:
        return scope_of_operator(create_tenant(session, clock, name="acme").id)


@pytest.fixture
def member(sqlite_database: Database, clock: FakeClock, scope: TenantScope) -> str:
    with sqlite_database.transaction() as session:
        fields = {"email": "Ann@Acme.example", "role": "owner", "password_hash": HASH}
        return members.add(session, scope, clock, **fields).id  # type: ignore[arg-type]


@pytest.fixture
def dashboard_auth(sqlite_database: Database, clock: FakeClock) -> Iterator[DashboardAuth]:
    attempts = FailedAttempts(MemoryCounters(clock), clock, per_minute=5)
    yield DashboardAuth(Roles(sqlite_database), attempts, clock, TOKEN)


def _sign_in(database: Database, dashboard_auth: DashboardAuth, **fields: str) -> str:
    secret, address = fields.pop("secret", ""), fields.pop("address", "203.0.113.7")

    async def _attempt() -> str:
        async with dashboard_auth.attempt(address):
            proof = None if secret else members.check_password(database, **fields)
            with database.transaction() as session:
                made = dashboard_auth.sign_in(session, proof=proof, secret=secret, address=address)
                return made.cookie

    return asyncio.run(_attempt())


def _enter(database: Database, clock: FakeClock, email: str, password: str = PASSWORD) -> Member:
    proof = members.check_password(database, email, password)
    with database.transaction() as session:
        return members.authenticate_password(session, clock, proof)


def _role(database: Database, dashboard_auth: DashboardAuth, cookie: str) -> str | None:
    with database.read() as session:
        viewer = dashboard_auth.find(session, cookie)
    return viewer.role if viewer else None


def test_a_password_opens_a_session_that_ends_with_time_or_sign_out(
    sqlite_database: Database, clock: FakeClock, member: str, dashboard_auth: DashboardAuth
) -> None:
    entered = {"email": "ann@acme.example", "password": PASSWORD}
    first = _sign_in(sqlite_database, dashboard_auth, **entered)
    second = _sign_in(sqlite_database, dashboard_auth, **entered)
    assert first != second
    assert _role(sqlite_database, dashboard_auth, first) == "owner"
    with sqlite_database.transaction() as session:
        dashboard_auth.sign_out(session, first)
        assert session.get(DashboardSession, first) is None  # only its hash is stored
    assert _role(sqlite_database, dashboard_auth, first) is None
    clock.advance(hours=12)
    assert _role(sqlite_database, dashboard_auth, second) is None


def test_a_password_costs_what_rfc_9106_asks_and_another_cost_is_renewed() -> None:
    least, full = argon2.profiles.RFC_9106_LOW_MEMORY, hasher_of_the_product()
    assert (full.type, full.salt_len, full.hash_len) == (argon2.Type.ID, 16, 32)
    assert full.time_cost >= least.time_cost and full.memory_cost >= least.memory_cost
    assert full.check_needs_rehash(HASH) and not passwords.needs_rehash(HASH)


def test_passwords_and_sessions_are_stored_as_hashes_alone(
    sqlite_database: Database, member: str, dashboard_auth: DashboardAuth
) -> None:
    entered = {"email": "ann@acme.example", "password": PASSWORD}
    cookie = _sign_in(sqlite_database, dashboard_auth, **entered)
    with sqlite_database.read() as session:
        opened, stored = (
            session.scalars(select(DashboardSession)).one(),
            session.get(Member, member),
        )
        assert stored is not None and (stored.password_hash or "").startswith("$argon2id$")
        rows = f"{vars(opened)} {vars(stored)}"
    assert cookie not in rows and PASSWORD not in rows
    assert opened.secret_sha256 == hashlib.sha256(cookie.encode()).hexdigest()


@pytest.mark.parametrize(
    "change", [{"disabled": True}, {"role": "viewer"}, {"password": "another password"}]
)
def test_a_change_of_rights_ends_every_session(
    sqlite_database: Database,
    clock: FakeClock,
    scope: TenantScope,
    member: str,
    dashboard_auth: DashboardAuth,
    change: dict[str, object],
) -> None:
    with sqlite_database.transaction() as session:
        members.add(session, scope, clock, email="b@acme.example", role="owner")
        cookie = sessions.begin(session, clock, member_id=member)
    assert _role(sqlite_database, dashboard_auth, cookie) == "owner"
    with sqlite_database.transaction() as session:
        if "password" in change:
            members.set_password(session, scope, clock, member, HASH)
        else:
            members.change(session, scope, clock, member, **change)  # type: ignore[arg-type]
    assert _role(sqlite_database, dashboard_auth, cookie) is None


def test_wrong_credentials_say_one_thing_and_are_limited(
    sqlite_database: Database, clock: FakeClock, member: str, dashboard_auth: DashboardAuth
) -> None:
    said = set()
    for email in ("ann@acme.example", "nobody@acme.example"):
        with pytest.raises(Unauthenticated) as refused:
            _sign_in(sqlite_database, dashboard_auth, email=email, password="wrong password")
        said.add(str(refused.value))
    assert len(said) == 1
    with pytest.raises(RateLimited):
        for _ in range(10):
            with pytest.raises(Unauthenticated):
                _sign_in(sqlite_database, dashboard_auth, secret="th_guess")
    with pytest.raises(RateLimited):  # even the right password waits now, from that address
        _sign_in(sqlite_database, dashboard_auth, email="ann@acme.example", password=PASSWORD)
    other = {"email": "ann@acme.example", "password": PASSWORD, "address": "198.51.100.9"}
    assert _sign_in(sqlite_database, dashboard_auth, **other)


def test_a_key_or_the_operators_token_opens_the_dashboard(
    sqlite_database: Database, clock: FakeClock, scope: TenantScope, dashboard_auth: DashboardAuth
) -> None:
    with sqlite_database.transaction() as session:
        project = create_project(session, scope, clock, name="p").id
        key = keys.issue(session, scope, clock, project_id=project, name="k", role="finance")
        bound = keys.issue(
            session,
            scope,
            clock,
            project_id=project,
            name="bound",
            scopes=KeyScopes(routes=frozenset({"/v1/*"})),
        )
    cookie = _sign_in(sqlite_database, dashboard_auth, secret=key.secret)
    assert _role(sqlite_database, dashboard_auth, cookie) == "finance"
    assert _role(
        sqlite_database, dashboard_auth, _sign_in(sqlite_database, dashboard_auth, secret=TOKEN)
    ) == ("operator")
    with pytest.raises(Forbidden):
        _sign_in(sqlite_database, dashboard_auth, secret=bound.secret)
    with sqlite_database.transaction() as session:
        keys.revoke(session, scope, clock, key.id)
    assert _role(sqlite_database, dashboard_auth, cookie) is None


def test_a_viewer_may_what_casbin_says(
    sqlite_database: Database, clock: FakeClock, scope: TenantScope, dashboard_auth: DashboardAuth
) -> None:
    with sqlite_database.transaction() as session:
        viewer_member = members.add(session, scope, clock, email="v@acme.example", role="viewer")
        cookie = sessions.begin(session, clock, member_id=viewer_member.id)
    with sqlite_database.read() as session:
        viewer = dashboard_auth.find(session, cookie)
    assert viewer is not None
    assert dashboard_auth.may(viewer, "usage", "read")
    assert not dashboard_auth.may(viewer, "keys", "write")
    assert not dashboard_auth.may(viewer, "tenants", "read")


def test_a_closed_tenant_has_no_sessions_a_suspended_one_has(
    sqlite_database: Database,
    clock: FakeClock,
    scope: TenantScope,
    member: str,
    dashboard_auth: DashboardAuth,
) -> None:
    with sqlite_database.transaction() as session:
        cookie = sessions.begin(session, clock, member_id=member)
        change_tenant(session, scope, clock, status="suspended")
    assert _role(sqlite_database, dashboard_auth, cookie) == "owner"
    with sqlite_database.transaction() as session:
        change_tenant(session, scope, clock, status="closed")
    assert _role(sqlite_database, dashboard_auth, cookie) is None


def test_bad_members_are_refused(
    sqlite_database: Database, clock: FakeClock, scope: TenantScope, member: str
) -> None:
    with sqlite_database.transaction() as session:
        for fields in (
            {"email": "no address", "role": "viewer"},
            {"email": "x@acme.example", "role": "king"},
        ):
            with pytest.raises(BadRequest):
                members.add(session, scope, clock, **fields)  # type: ignore[arg-type]
        with pytest.raises(Conflict):
            members.add(session, scope, clock, email="ANN@acme.example", role="viewer")
        with pytest.raises(Conflict, match="last owner"):
            members.change(session, scope, clock, member, disabled=True)


def test_no_password_is_in_the_audit_log(
    sqlite_database: Database, clock: FakeClock, scope: TenantScope, member: str
) -> None:
    hashed = members.hash_for(sqlite_database, "ann@acme.example", "yet another password")
    with sqlite_database.transaction() as session:
        members.set_password(session, scope, clock, member, hashed)
    with sqlite_database.read() as session:
        shown = str([audit.describe(entry) for entry in audit.entries(session, scope)])
    assert "member.password" in shown and "yet another" not in shown and "argon2" not in shown


def test_a_session_belongs_to_one_caller(sqlite_database: Database, clock: FakeClock) -> None:
    with (
        sqlite_database.transaction() as session,
        pytest.raises(ValueError, match="exactly one of"),
    ):
        sessions.begin(session, clock)
    assert timedelta(hours=1) < sessions.LIFETIME


def test_a_wrong_password_costs_one_computation_however_many_tenants_have_the_address(
    sqlite_database: Database, clock: FakeClock, member: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    plain = passwords.hash_secret

    def _counted(*given: object, **named: object) -> bytes:
        computed.append(given)
        return plain(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(passwords, "hash_secret", _counted)
    for name in ("beta", "gamma"):
        for email in ("ann@acme.example", "nobody@acme.example"):
            hashed = members.hash_for(sqlite_database, email, f"{name} {name} {name}")
            with sqlite_database.transaction() as session:
                known = session.scalars(select(Tenant.id).where(Tenant.name == name)).first()
                tenant_id = known or create_tenant(session, clock, name=name).id
                other = scope_of_operator(tenant_id)
                fields = {"email": email, "role": "viewer", "password_hash": hashed}
                members.add(session, other, clock, **fields)  # type: ignore[arg-type]
    costs = {}
    for email in ("ann@acme.example", "nobody@acme.example", "never@acme.example"):
        computed.clear()
        with pytest.raises(Unauthenticated):
            members.check_password(sqlite_database, email, "wrong wrong wrong")
        costs[email] = len(computed)
    assert set(costs.values()) == {1}, costs
    for password, tenant in ((PASSWORD, "acme"), ("gamma gamma gamma", "gamma")):
        found = _enter(sqlite_database, clock, "ann@acme.example", password)
        with sqlite_database.read() as session:
            assert session.get_one(Tenant, found.tenant_id).name == tenant


def test_a_hash_is_computed_outside_of_transactions_alone(
    sqlite_database: Database, clock: FakeClock, member: str
) -> None:
    """It would hold the lock of the whole database for as long as it takes."""
    with sqlite_database.transaction(), pytest.raises(RuntimeError, match="is hashed inside"):
        passwords.hash_password(PASSWORD)
    with sqlite_database.transaction(), pytest.raises(RuntimeError, match="is checked inside"):
        passwords.matching([None], PASSWORD)
    with pytest.raises(BadRequest, match="characters"):
        members.hash_for(sqlite_database, "ann@acme.example", "short")


@pytest.mark.parametrize("change", ["password", "disabled"])
def test_a_password_counts_only_while_it_is_the_members(
    sqlite_database: Database, clock: FakeClock, scope: TenantScope, member: str, change: str
) -> None:
    """A change between the check and the session that it begins is not passed over."""
    proof = members.check_password(sqlite_database, "ann@acme.example", PASSWORD)
    with sqlite_database.transaction() as session:
        members.add(session, scope, clock, email="other@acme.example", role="owner")
        if change == "password":
            members.set_password(session, scope, clock, member, passwords.PasswordHash("another"))
        else:
            members.change(session, scope, clock, member, disabled=True)
    with sqlite_database.transaction() as session, pytest.raises(Unauthenticated, match="Wrong"):
        members.authenticate_password(session, clock, proof)


def test_a_password_that_an_admin_set_ends_with_a_role_above_the_admins(
    sqlite_database: Database, clock: FakeClock, scope: TenantScope, member: str
) -> None:
    with sqlite_database.transaction() as session:
        tenant = scope.tenant_id
        admin = scope_for(Actor("mem_admin", "admin", tenant), tenant)
        fields = {"email": "vi@acme.example", "role": "viewer", "password_hash": HASH}
        made = members.add(session, admin, clock, **fields)
        link = invitations.invite(session, admin, clock, made.id)
        members.change(session, scope, clock, made.id, role="owner")
    with pytest.raises(Unauthenticated, match="Wrong e-mail"):
        members.check_password(sqlite_database, "vi@acme.example", PASSWORD)
    with sqlite_database.transaction() as session:
        made = members.get(session, scope, made.id)
        with pytest.raises(Unauthenticated, match="link has expired"):
            invitations.accept_with_password(session, clock, link.token, HASH)
        assert members.state_of(made) == "invited"
        fresh = invitations.invite(session, scope, clock, made.id)
        invitations.accept_with_password(session, clock, fresh.token, HASH)
    assert _enter(sqlite_database, clock, "vi@acme.example").id == made.id


def test_an_account_that_an_admin_may_have_linked_ends_with_a_role_above_the_admins(
    sqlite_database: Database, clock: FakeClock, scope: TenantScope
) -> None:
    """The admin opens the link with an account of their own; so may a password set in that session be
    the admin's. A link that was only mailed is the member's alone."""
    tenant = scope.tenant_id
    admin = scope_for(Actor("mem_admin", "admin", tenant), tenant)
    with sqlite_database.transaction() as session:
        members.add(session, scope, clock, email="other@acme.example", role="owner")
        made = members.add(session, admin, clock, email="al@acme.example", role="admin")
        link = invitations.invite(session, admin, clock, made.id)
        identity = sign_on.ExternalIdentity("issuer admin", "", invitation=link.token)
        assert sign_on.authenticate(session, clock, identity) is made
        own = scope_for(Actor(made.id, "admin", tenant), tenant)
        members.set_password(session, own, clock, made.id, HASH)
        members.change(session, scope, clock, made.id, role="finance")
        assert sign_on.authenticate(session, clock, replace(identity, invitation="")) is made
        members.change(session, scope, clock, made.id, role="owner")
        with pytest.raises(Unauthenticated, match="not linked"):
            sign_on.authenticate(session, clock, replace(identity, invitation=""))
    with pytest.raises(Unauthenticated, match="Wrong e-mail"):
        members.check_password(sqlite_database, "al@acme.example", PASSWORD)
    with sqlite_database.transaction() as session:
        made = members.get(session, scope, made.id)
        mailed = invitations.invite(session, scope, clock, made.id, shown=False)
        proved = sign_on.ExternalIdentity("issuer al", "", invitation=mailed.token)
        sign_on.authenticate(session, clock, proved)
        members.change(session, scope, clock, made.id, role="admin")
        members.change(session, scope, clock, made.id, role="owner")
        assert sign_on.authenticate(session, clock, replace(proved, invitation="")) is made


# The role of a key, of the member who answers for it, and what the key does.
CAPPED = [
    ("owner", "owner", "owner"),
    ("owner", "admin", "admin"),
    ("owner", "finance", "finance"),
    ("owner", "developer", "developer"),
    ("admin", "owner", "admin"),
    ("admin", "finance", "finance"),
    ("admin", "developer", "developer"),
    ("admin", "viewer", "viewer"),
    ("finance", "admin", "finance"),
    ("finance", "developer", "viewer"),
    ("developer", "finance", "viewer"),
    ("developer", "viewer", "viewer"),
    ("viewer", "owner", "viewer"),
]


@pytest.mark.parametrize(("of_key", "of_member", "effective"), CAPPED)
def test_a_key_has_no_higher_role_than_its_member_has_now(
    sqlite_database: Database,
    clock: FakeClock,
    scope: TenantScope,
    dashboard_auth: DashboardAuth,
    *,
    of_key: str,
    of_member: str,
    effective: str,
) -> None:
    """In the key's own role, its scope and a session that the key opened; a higher role returns it."""
    tenant = scope.tenant_id
    with sqlite_database.transaction() as session:
        members.add(session, scope, clock, email="other@acme.example", role="owner")
        made = members.add(session, scope, clock, email="bo@acme.example", role="owner")
        own = scope_for(Actor(made.id, "owner", tenant), tenant)
        project = create_project(session, own, clock, name="default").id
        key = keys.issue(session, own, clock, project_id=project, name="k", role=of_key)
    cookie = _sign_in(sqlite_database, dashboard_auth, secret=key.secret)
    for role, expected in ((of_member, effective), ("owner", of_key)):
        with sqlite_database.transaction() as session:
            members.change(session, scope, clock, made.id, role=role)
        with sqlite_database.read() as session:
            found = keys.find(session, key.secret, clock.now())
            assert (found.role, found.scope.role) == (expected, expected)
            assert keys.find_by_id(session, key.id, clock.now()).role == expected
        assert _role(sqlite_database, dashboard_auth, cookie) == expected
