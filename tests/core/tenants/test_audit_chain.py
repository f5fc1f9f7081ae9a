"""The hash chain of the audit log: what was changed, taken away or put in between is found."""

from typing import Any

import pytest
from sqlalchemy import select, update

from billing import guards
from core.clock import FakeClock
from core.database import Database
from core.tenants import audit, audit_chain
from core.tenants.models import AuditEntry
from core.tenants.organisations import create_tenant
from core.tenants.scope import TenantScope, scope_of_operator

_CHANGE = {"rate": 1.0, "share": 0.25, "text": "héllo", "list": [1, {"b": 2, "a": None}]}


@pytest.fixture
def scope(database: Database, clock: FakeClock) -> TenantScope:
    """Of a tenant with four entries, beside another with entries of its own."""
    with database.transaction() as session:
        made = [
            scope_of_operator(create_tenant(session, clock, name=n).id) for n in ("acme", "bolt")
        ]
        for number in range(3):
            for each in made:
                before = {"n": number} | _CHANGE
                audit.record(
                    session, each, clock, "x.change", f"x{number}", before=before, after=None
                )
    return made[0]


def _verify(database: Database, scope: TenantScope, expected: str = "") -> audit_chain.Verification:
    with database.read() as session:
        return audit_chain.verify(session, scope.tenant_id, expected)


def _update(database: Database, entry_id: int, **values: Any) -> None:
    with (
        database.transaction() as session,
        guards.open_for_update(session, AuditEntry.__tablename__),
    ):
        session.execute(update(AuditEntry).where(AuditEntry.id == entry_id).values(**values))


def _ids(database: Database, scope: TenantScope) -> list[int]:
    own = AuditEntry.tenant_id == scope.tenant_id
    with database.read() as session:
        return list(session.scalars(select(AuditEntry.id).where(own).order_by(AuditEntry.id)))


def test_an_untouched_log_is_whole_and_stays_so_as_it_grows(
    database: Database, clock: FakeClock, scope: TenantScope
) -> None:
    first = _verify(database, scope)
    assert (first.entries, first.fault_count, first.unchained) == (4, 0, 0) and first.digest
    with database.transaction() as session:
        audit.record(session, scope, clock, "y.add", "y", before=None, after={"a": 1})
    then = _verify(database, scope, first.digest)
    assert (then.entries, then.fault_count) == (5, 0) and then.digest != first.digest
    assert _verify(database, scope, "0" * 64).faults == [
        "No entry has the expected digest " + "0" * 64 + "."
    ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"after": {"a": 2}}, "content"),
        ({"before": None}, "content"),
        ({"target": "other"}, "content"),
        ({"actor": "nobody"}, "does not follow"),
        ({"action": "x.add"}, "does not follow"),
        ({"request_id": "req_1"}, "does not follow"),
        ({"content_sha256": "0" * 64}, "content"),
        ({"digest": "0" * 64}, "does not follow"),
        ({"digest": ""}, "has no digest"),
        ({"tenant_id": "org_else"}, "does not follow"),  # as if it were taken away
    ],
)
def test_a_change_of_an_entry_is_found(
    database: Database, scope: TenantScope, values: dict[str, Any], said: str
) -> None:
    _update(database, _ids(database, scope)[2], **values)
    done = _verify(database, scope)
    assert done.fault_count and said in " ".join(done.faults)


def test_a_last_entry_that_is_gone_is_found(database: Database, scope: TenantScope) -> None:
    _update(database, _ids(database, scope)[-1], tenant_id="org_else")
    assert _verify(database, scope).faults == ["The chain has 3 entries, and 4 were written."]


def test_an_erasure_empties_the_content_and_the_chain_holds(
    database: Database, scope: TenantScope
) -> None:
    entry = _ids(database, scope)[1]
    _update(database, entry, before=None, after=None, target="", salt="")
    done = _verify(database, scope)
    assert (done.entries, done.emptied, done.fault_count) == (4, 1, 0)
    _update(database, entry, actor="nobody")
    assert _verify(database, scope).fault_count


def test_entries_from_before_the_chain_are_counted_apart(
    database: Database, clock: FakeClock, scope: TenantScope
) -> None:
    other = scope_of_operator("org_old")
    with database.transaction() as session:
        session.add(
            AuditEntry(tenant_id=other.tenant_id, at=clock.now(), actor="a", action="b", target="c")
        )
    with database.transaction() as session:
        audit.record(session, other, clock, "x.add", "x", before=None, after=None)
    done = _verify(database, other)
    assert (done.entries, done.unchained, done.fault_count) == (1, 1, 0)
