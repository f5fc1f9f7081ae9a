"""The audit log is written and never changed, whoever tries."""

import pytest
from sqlalchemy import text

from core.clock import FakeClock
from core.database import Database
from core.tenants import audit
from core.tenants.organisations import create_tenant
from core.tenants.scope import scope_of_operator


@pytest.mark.parametrize(
    "change", ["update audit_log set actor = 'nobody'", "delete from audit_log"]
)
def test_the_audit_log_refuses_to_change(database: Database, clock: FakeClock, change: str) -> None:
    with database.transaction() as session:
        tenant = create_tenant(session, clock, name="acme")
        scope = scope_of_operator(tenant.id)
        before = [audit.describe(each) for each in audit.entries(session, scope)]
    assert before
    with pytest.raises(Exception, match="append-only"), database.transaction() as session:
        session.execute(text(change))
    with database.read() as session:
        assert [audit.describe(each) for each in audit.entries(session, scope)] == before
