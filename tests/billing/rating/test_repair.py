"""A batch is rated whole or not at all, and `usage rebuild` repairs what the audit finds."""

from typing import Any

import pytest
from sqlalchemy import func, select, update

from billing.audit import reconcile
from billing.rating import rating, repair
from billing.rating.rating_worker import rate_all
from billing.usage import service_rollups
from billing.usage.tables import (
    Charge,
    DailyEndUserUsage,
    DailyEngineUsage,
    DailyService,
    DailyTenantUsage,
    DailyUsage,
    HourlyService,
    HourlyUsage,
    UsageBatch,
)
from tests.billing.conftest import Deployment

ROLLUPS: tuple[Any, ...] = (
    *(HourlyUsage, DailyUsage, DailyTenantUsage, HourlyService, DailyService),
    *(DailyEngineUsage, DailyEndUserUsage),
)
PRICE = 80 * 150_000 + 20 * 75_000 + 50 * 600_000  # of an event, by hand


def sums(made: Deployment) -> list[int]:
    """Of the amounts in each roll-up."""
    with made.database.read() as session:
        return [int(session.scalar(select(func.sum(each.amount))) or 0) for each in ROLLUPS]


def events(made: Deployment, count: int) -> list[Any]:
    return [made.event(end_user="ann", engine_id="gpu-1") for _ in range(count)]


def test_a_batch_with_fewer_events_than_it_was_stored_with_is_refused_alone(
    deployment: Deployment,
) -> None:
    made = deployment
    made.record(*events(made, 3))
    with made.database.transaction() as session:
        (batch,) = session.scalars(select(UsageBatch.id)).all()
        session.execute(update(UsageBatch).values(events=5))
    made.record(*events(made, 2))
    rate_all(made.database, made.clock)
    with made.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Charge)) == 2
        marked = session.get_one(UsageBatch, batch)
        assert marked.rated_at is None and marked.refused_at == made.clock.now()
        report = reconcile.audit(session)
        assert report.lost == 2 and report.pending == 5
    assert repair.repair(made.database, made.clock).describe() == {
        "rated": 0,
        "refused": 1,
        "hours": 1,
        "days": 1,
    }
    with made.database.transaction() as session:  # the rest arrives
        session.execute(update(UsageBatch).where(UsageBatch.id == batch).values(events=3))
    repaired = repair.repair(made.database, made.clock)
    assert (repaired.rated, repaired.refused) == (3, 0)
    with made.database.read() as session:
        assert reconcile.audit(session).clean
    assert sums(made) == [5 * PRICE] * len(ROLLUPS)


def test_events_of_rated_batches_without_a_charge_are_rated_once(deployment: Deployment) -> None:
    """As a worker leaves them that saw none of the batch's rows and marked it."""
    made = deployment
    made.record(*events(made, 5))
    with made.database.transaction() as session:
        session.execute(update(UsageBatch).values(rated_at=made.clock.now()))
    service_rollups.sum_all(made.database, made.clock)
    made.record(*events(made, 2), made.event(price_version="gone"))
    rate_all(made.database, made.clock)
    with made.database.read() as session:
        assert reconcile.audit(session).lost == 5
    for expected in (5, 0):
        assert repair.repair(made.database, made.clock).rated == expected
        assert sums(made) == [7 * PRICE] * len(ROLLUPS)
    with made.database.read() as session:
        report = reconcile.audit(session)
        assert (report.differences, report.parked) == ((), 1)


@pytest.mark.parametrize("table", ROLLUPS, ids=lambda each: each.__tablename__)
def test_every_roll_up_is_repaired(lite: Deployment, table: Any) -> None:
    made = lite
    made.record(*events(made, 4))
    made.rate()
    service_rollups.sum_all(made.database, made.clock)
    with made.database.transaction() as session:
        session.execute(update(table).values(amount=table.amount + 7))
    assert sums(made) != [4 * PRICE] * len(ROLLUPS)
    repair.repair(made.database, made.clock)
    assert sums(made) == [4 * PRICE] * len(ROLLUPS)


def test_a_batch_with_more_events_is_refused_too(lite: Deployment) -> None:
    made = lite
    made.record(*events(made, 2))
    made.record(*events(made, 3))
    with made.database.transaction() as session:
        session.execute(update(UsageBatch).where(UsageBatch.events == 2).values(events=1))
    with made.database.transaction() as session:
        assert rating.rate(session, made.clock) == rating.Rated(2, 3)
        assert rating.rate(session, made.clock) == rating.Rated(0, 0)
        assert rating.release_refused(session) == 0
    with made.database.read() as session:
        assert session.scalar(select(func.count()).where(UsageBatch.refused_at.is_not(None))) == 1
    assert sums(made)[0] == 3 * PRICE
