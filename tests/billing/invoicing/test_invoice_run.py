"""The invoice run over many tenants: few round trips, killed and run again, one fault apart."""

from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import event, select, update

from billing.audit import reconcile
from billing.invoicing import invoice_run
from billing.invoicing.tables import Invoice
from billing.usage.tables import DailyUsage, UsageBatch
from core.clock import FakeClock
from core.database import Database
from tests.billing.conftest import Deployment, deployment_of

CLOSED = datetime(2026, 2, 3, tzinfo=UTC)


def used_by(deployment: Deployment, tenants: int) -> list[str]:
    names = [f"org_{number:03d}" for number in range(tenants)]
    for name in names:
        deployment.tenant(name)
    deployment.record(*[deployment.event(tenant_id=name) for name in names for _ in range(3)])
    return names


def statements_of_a_run(deployment: Deployment, tenants: int) -> int:
    names = used_by(deployment, tenants)
    deployment.rate()
    deployment.clock.set(CLOSED)
    ran: list[str] = []

    def _count(_c: Any, _u: Any, statement: str, *_: Any) -> None:
        ran.append(statement)

    event.listen(deployment.database.db_engine, "before_cursor_execute", _count)
    try:
        result = invoice_run.run(deployment.database, deployment.clock, names, current=False)
    finally:
        event.remove(deployment.database.db_engine, "before_cursor_execute", _count)
    assert len(result.finalised) == tenants
    return len(ran)


def test_statements_do_not_grow_with_tenants(deployment: Deployment) -> None:
    assert statements_of_a_run(deployment, 40) < 60


def test_a_run_that_is_killed_goes_on_where_it_was(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = used_by(deployment, 7)
    deployment.clock.set(CLOSED)
    monkeypatch.setattr(invoice_run, "TENANTS_AT_ONCE", 3)

    class Killed(Exception):
        pass

    def _kill(done: int, of: int) -> None:
        assert (done, of) == (3, 7)
        raise Killed

    with pytest.raises(Killed):
        invoice_run.run(deployment.database, deployment.clock, names, current=False, progress=_kill)
    seen: list[tuple[int, int]] = []
    again = invoice_run.run(
        deployment.database,
        deployment.clock,
        names,
        current=False,
        progress=lambda done, of: seen.append((done, of)),
    )
    assert (len(again.unchanged), len(again.finalised)) == (3, 4)
    assert seen == [(3, 7), (6, 7), (7, 7)]
    once_more = invoice_run.run(deployment.database, deployment.clock, names, current=False)
    assert (len(once_more.unchanged), len(once_more.finalised), once_more.drafted) == (7, 0, [])
    with deployment.database.read() as session:
        numbers = sorted(session.scalars(select(Invoice.number)))
        assert reconcile.audit(session).clean
    assert numbers == list(range(1, 8))


def test_one_tenant_that_cannot_be_billed_does_not_hold_up_the_others(
    postgres_database: Database, clock: FakeClock
) -> None:
    deployment = deployment_of(postgres_database, clock)
    names = used_by(deployment, 5)
    deployment.rate()
    deployment.record(deployment.event(tenant_id="org_002"))
    clock.set(CLOSED)
    with deployment.database.transaction() as busy:  # a worker that is rating it, and does not end
        busy.scalars(
            select(UsageBatch).where(UsageBatch.rated_at.is_(None)).with_for_update()
        ).all()
        result = invoice_run.run(deployment.database, clock, names, current=False, patience_s=1.0)
    assert list(result.failed) == ["org_002"] and "not rated" in result.failed["org_002"]
    assert len(result.finalised) == 4
    after = invoice_run.run(deployment.database, clock, names, current=False)
    assert (len(after.unchanged), len(after.finalised), after.failed) == (4, 1, {})


def test_broken_rows_of_one_tenant_do_not_hold_up_the_others(deployment: Deployment) -> None:
    names = used_by(deployment, 5)
    deployment.rate()
    with deployment.database.transaction() as session:
        broken = update(DailyUsage).where(DailyUsage.tenant_id == "org_003")
        session.execute(broken.values(usage_period_id="per_gone"))
    deployment.clock.set(CLOSED)
    result = invoice_run.run(deployment.database, deployment.clock, names, current=False)
    assert result.failed == {"org_003": "KeyError: 'per_gone'"}
    assert len(result.finalised) == 4
    with deployment.database.read() as session:
        numbers = sorted(session.scalars(select(Invoice.number)))
    assert numbers == [1, 2, 3, 4]


def test_an_invoice_is_named_once_though_its_tenant_is_tried_again(lite: Deployment) -> None:
    """January of both is final when February of one fails and each tenant is tried alone."""
    names = used_by(lite, 2)
    lite.rate()
    lite.clock.set(datetime(2026, 2, 10, tzinfo=UTC))
    lite.record(*[lite.event(tenant_id=name) for name in names])
    lite.rate()
    with lite.database.transaction() as session:
        february = (DailyUsage.tenant_id == "org_001", DailyUsage.at >= CLOSED)
        session.execute(update(DailyUsage).where(*february).values(usage_period_id="per_gone"))
    lite.clock.set(datetime(2026, 3, 5, tzinfo=UTC))
    result = invoice_run.run(lite.database, lite.clock, names, current=False)
    assert list(result.failed) == ["org_001"]
    assert (len(result.finalised), len(result.unchanged)) == (3, 0)
    assert len(set(result.all_ids)) == 3
