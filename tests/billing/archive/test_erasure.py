"""An end user's name goes, the sums stay, and the tables are append-only again."""

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import DBAPIError

from billing.archive.erasure import Erased, erase_end_user
from billing.audit import reconcile
from billing.invoicing import invoice_run
from billing.usage.tables import ParkedEvent, UsageEventRow
from core.errors import BadRequest
from core.tenants.models import AuditEntry
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import Deployment

NAME = "alice@example.com"


def erase(deployment: Deployment, name: str = NAME) -> Erased:
    with deployment.database.transaction() as session:
        return erase_end_user(session, scope_of_operator("acme"), deployment.clock, name)


def test_a_name_is_erased_and_no_sum_changes(deployment: Deployment) -> None:
    deployment.tenant("other")
    deployment.record(
        deployment.event(end_user=NAME),
        deployment.event(end_user="bob"),
        deployment.event(end_user=NAME, tenant_id="other"),
        deployment.event(end_user=NAME, price_version="gone"),  # is parked
    )
    deployment.clock.advance(days=40)
    invoice_run.run(deployment.database, deployment.clock)
    with deployment.database.read() as session:
        before = reconcile.audit(session)
    assert erase(deployment) == Erased(events=1, parked=1)
    assert erase(deployment) == Erased(events=0, parked=0)
    with deployment.database.read() as session:
        rows = session.execute(select(UsageEventRow.tenant_id, UsageEventRow.end_user)).all()
        (parked,) = session.scalars(select(ParkedEvent)).all()
        after = reconcile.audit(session)
        logged = session.scalars(
            select(AuditEntry).where(AuditEntry.action == "end_user.erase").order_by(AuditEntry.id)
        ).all()
    assert sorted(rows, key=str) == [("acme", "bob"), ("acme", None), ("other", NAME)]
    assert parked.payload["end_user"] is None and parked.payload["request_id"]
    assert after.as_json() == before.as_json() and not after.differences
    assert logged[0].after == {"events": 1, "parked": 1} and NAME not in str(logged[0].after)


def test_events_stay_append_only_after_an_erasure(deployment: Deployment) -> None:
    deployment.record(deployment.event(end_user=NAME))
    erase(deployment)
    with (
        pytest.raises(DBAPIError, match="append-only"),
        deployment.database.transaction() as session,
    ):
        session.execute(update(UsageEventRow).values(output_tokens=0))


def test_an_erasure_needs_a_name(deployment: Deployment) -> None:
    with pytest.raises(BadRequest, match="end_user is empty"):
        erase(deployment, "")
