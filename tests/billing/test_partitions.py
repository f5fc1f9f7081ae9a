"""Usage lies in partitions by month: unique over all of them, dropped whole, never billed twice."""

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from sqlalchemy import text

from billing import invoice_run, partitions, reconcile, rollups, usage
from core.clock import FakeClock
from core.database import Database
from core.errors import Conflict
from core.ids import REQUEST, floor_id, use_sources
from tests.billing.conftest import Deployment, deployment_of


@pytest.fixture
def dated(postgres_database: Database) -> Iterator[Deployment]:
    """Ids whose time is the fake clock's."""
    import os

    clock = FakeClock(datetime(2026, 1, 20, tzinfo=UTC))
    with use_sources(lambda: int(clock.now().timestamp() * 1000), os.urandom):
        yield deployment_of(postgres_database, clock)


def rows(deployment: Deployment, table: str) -> int:
    with deployment.database.read() as session:
        return int(session.execute(text(f"select count(*) from {table}")).scalar_one())


def test_partitions_are_made_ahead_and_take_over_what_the_default_holds(dated: Deployment) -> None:
    early = dated.event()
    dated.record(early)
    assert rows(dated, "usage_events_default") == 1
    with dated.database.transaction() as session:
        made = partitions.ensure_ahead(session, dated.clock.now())
        assert made == [f"usage_events_2026_{month:02d}" for month in (1, 2, 3, 4)]
        assert partitions.ensure_ahead(session, dated.clock.now()) == []
    assert rows(dated, "usage_events_default") == 0
    assert dated.record(early) == 0
    dated.clock.advance(days=20)
    dated.record(dated.event())
    assert rows(dated, "usage_events_2026_01") == rows(dated, "usage_events_2026_02") == 1


def test_dropped_usage_stays_billed_and_a_replay_of_it_is_parked(dated: Deployment) -> None:
    with dated.database.transaction() as session:
        partitions.ensure_ahead(session, dated.clock.now())
    old = dated.event()
    dated.record(old)
    with dated.database.transaction() as session:
        counted = (old.input_tokens, old.cached_tokens, old.output_tokens + old.waived_tokens)
        usage.store_receipts(session, [(old.request_id, "engine", *counted, old.finished_at)])
    dated.rate()
    dated.clock.advance(days=2)
    assert reconcile.close_days(dated.database, dated.clock)
    dated.clock.advance(days=38)
    dated.record(dated.event())
    now = dated.clock.now()
    unrated = dated.event(request_id=floor_id(REQUEST, datetime(2026, 1, 21, tzinfo=UTC)))
    dated.record(unrated)
    with pytest.raises(Conflict, match="not rated"), dated.database.transaction() as session:
        partitions.drop_before(session, now, now)
    invoice_run.run(dated.database, dated.clock)
    with dated.database.transaction() as session:
        assert partitions.drop_before(session, now, now) == 2
        before = rollups.stored(session, rollups.DAILY)
        rollups.rebuild(session)
        assert rollups.stored(session, rollups.DAILY) == before
    assert rows(dated, "usage_events") == 1
    assert dated.record(old) == 1
    with dated.database.read() as session:
        assert [row.code for row in usage.parked(session)] == ["too_old"]
        report = reconcile.audit(session)
        assert (report.differences, report.parked) == ((), 1)
    assert partitions.retention_start(now, 2) == datetime(2026, 1, 1, tzinfo=UTC)
