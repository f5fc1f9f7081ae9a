"""Usage lies in partitions by month: unique over all of them, dropped whole, never billed twice."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from billing.audit import reconcile
from billing.invoicing import invoice_run
from billing.pricing import prices
from billing.rating import repair
from billing.rating.unrated import UnratedUsage
from billing.usage import partitions, rollups, service_rollups, usage
from billing.usage.usage_buckets import BucketQuery, Width, usage_buckets
from core.clock import FakeClock, SystemClock
from core.database import Database
from core.errors import Conflict
from core.events import EngineCount, UsageEvent
from core.ids import REQUEST, floor_id, use_sources
from core.tenants.scope import scope_of_operator
from gateway.cli.main import main
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
        assert made == [
            f"{table}_2026_{month:02d}"
            for table in ("usage_events", "charges", "engine_receipts")
            for month in (1, 2, 3, 4)
        ]
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
        count = EngineCount(old.request_id, "engine", *counted, old.finished_at)
        usage.store_receipts(session, [count])
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


def test_retention_reaches_rows_of_no_month(dated: Deployment) -> None:
    """Those of the default partition: of months before the first partition, as after an upgrade."""
    old = dated.event(end_user="ann")
    undated = dated.event(request_id="batch-7", end_user="bob")
    dated.record(old, undated)
    assert rows(dated, "usage_events_default") == 2
    dated.rate()
    dated.clock.advance(days=2)
    assert reconcile.close_days(dated.database, dated.clock)
    dated.clock.advance(days=40)
    with dated.database.transaction() as session:
        partitions.ensure_ahead(session, dated.clock.now())
    kept = dated.event(end_user="cleo")
    dated.record(kept)
    dated.rate()
    with dated.database.transaction() as session:
        assert partitions.drop_before(session, dated.clock.now(), dated.clock.now()) == 1
    with dated.database.read() as session:
        left = session.execute(text("select request_id, end_user from usage_events order by 1"))
        assert [tuple(row) for row in left] == [("batch-7", None), (kept.request_id, "cleo")]
    assert dated.record(undated) == 0, "it is known"


def test_names_of_end_users_are_dropped_with_their_events(dated: Deployment) -> None:
    with dated.database.transaction() as session:
        partitions.ensure_ahead(session, dated.clock.now())
    for name in ("ann", "bob"):
        dated.record(dated.event(end_user=name, engine_id="gpu-1"))
        dated.rate()
        service_rollups.sum_all(dated.database, dated.clock)
        if name == "ann":
            dated.clock.advance(days=40)  # into a month that stays
    with dated.database.transaction() as session:
        assert partitions.drop_before(session, dated.clock.now(), dated.clock.now()) == 1
        service_rollups.rebuild(session, dated.clock)
    with dated.database.read() as session:
        assert list(session.scalars(text("select end_user from usage_end_user_daily"))) == ["bob"]
        kept = text("select requests from usage_engine_daily order by at")
        assert list(session.scalars(kept)) == [1, 1], "no sum of engines is lost"
        span = {"start": datetime(2026, 1, 1, tzinfo=UTC), "end": datetime(2026, 3, 2, tzinfo=UTC)}
        query = BucketQuery(**span, width=Width.DAY, group_by=("end_user",), limit=90)
        found = usage_buckets(session, scope_of_operator("acme"), query)
        assert [row.group["end_user"] for each in found.buckets for row in each.rows] == ["bob"]


def test_charges_and_receipts_of_a_month_lie_in_its_partition(dated: Deployment) -> None:
    def _receipt(event: UsageEvent) -> EngineCount:
        generated = event.output_tokens + event.waived_tokens
        counts = (event.input_tokens, event.cached_tokens, generated)
        return EngineCount(event.request_id, "engine", *counts, event.finished_at)

    def _serve() -> None:
        event = dated.event()
        dated.record(event)
        with dated.database.transaction() as session:
            assert usage.store_receipts(session, [_receipt(event)]) == 1
            assert usage.store_receipts(session, [_receipt(event)]) == 0
        dated.rate()

    _serve()
    assert rows(dated, "charges_default") == rows(dated, "engine_receipts_default") == 1
    with dated.database.transaction() as session:
        partitions.ensure_ahead(session, dated.clock.now())
    assert rows(dated, "charges_default") == rows(dated, "engine_receipts_default") == 0
    dated.clock.advance(days=20)
    _serve()
    for table in ("charges", "engine_receipts"):
        assert rows(dated, f"{table}_2026_01") == rows(dated, f"{table}_2026_02") == 1
        for name in (table, f"{table}_2026_01"):
            for verb in (f"delete from {name}", f"truncate {name}"):
                with (
                    pytest.raises(DBAPIError, match="append-only"),
                    dated.database.transaction() as session,
                ):
                    session.execute(text(verb))
    with dated.database.transaction() as session:
        now = dated.clock.now()
        assert partitions.drop_before(session, now, now) == 1
        assert (
            session.execute(text("select to_regclass('engine_receipts_2026_01')")).scalar() is None
        )
    assert rows(dated, "charges") == 2 and rows(dated, "engine_receipts") == 1


def test_processes_that_start_at_once_make_each_partition_once(dated: Deployment) -> None:
    def _start(_: int) -> int:
        with dated.database.transaction() as session:
            return len(partitions.ensure_ahead(session, dated.clock.now()))

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(_start, range(6))) == [0, 0, 0, 0, 0, 12]


def _rated(made: Deployment) -> None:
    made.rate()


def _summed(made: Deployment) -> None:
    made.rate()
    service_rollups.sum_all(made.database, made.clock)


def _recorded(made: Deployment) -> None:
    made.record(made.event())


def _audited(made: Deployment) -> None:
    with made.database.read() as session:
        report = reconcile.audit(session)
        assert report.differences == () and report.pending == 5


def _counted(made: Deployment) -> None:
    """What budgets count of usage that waits."""
    with made.database.read() as session:
        unrated = UnratedUsage()
        unrated.refresh(session, frozenset(("acme",)), prices.load_price_book(session))
        assert unrated.spent({"tenant_id": {"acme"}}, "USD") == 5 * 43_500_000


@pytest.mark.parametrize("act", [_rated, _summed, _recorded, _audited, _counted])
def test_whoever_comes_while_a_partition_is_made_sees_each_event_once(
    dated: Deployment, act: Callable[[Deployment], None]
) -> None:
    """The rows of the month move from the default partition in a transaction that is not over yet."""
    dated.record(*[dated.event(end_user="ann", engine_id="gpu-1") for _ in range(5)])
    moved, waits = threading.Event(), text("select count(*) from pg_locks where not granted")

    def _make() -> None:
        with dated.database.transaction() as session:
            assert partitions.ensure_ahead(session, dated.clock.now())
            moved.set()
            for _ in range(100):  # until the other waits; one that does not is no reason to
                if session.scalar(waits):
                    break
                time.sleep(0.02)

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(_make)
        assert moved.wait(10)
        act(dated)
        made.result()
    repair.repair(dated.database, dated.clock)
    assert rows(dated, "charges") == rows(dated, "usage_events") == (6 if act is _recorded else 5)
    with dated.database.read() as session:
        assert reconcile.audit(session).clean


def test_no_partition_is_made_while_others_use_the_table(
    dated: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody waits for long: whoever wants the lock makes all others wait."""
    monkeypatch.setattr(partitions, "_LOCK_MS", 20)
    monkeypatch.setattr(partitions, "_PAUSE_S", 0.001)
    with dated.database.read() as reader:
        reader.execute(text("select count(*) from charges"))
        with dated.database.transaction() as session:
            assert partitions.ensure_ahead(session, dated.clock.now()) == []
            assert session.execute(text("show lock_timeout")).scalar_one() == "30s"
    with dated.database.transaction() as session:
        assert len(partitions.ensure_ahead(session, dated.clock.now())) == 12


def test_migrate_makes_the_partitions_of_the_coming_months(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", postgres_url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    assert main(["migrate"]) == 0
    assert main(["migrate"]) == 0
    database = Database(postgres_url)
    with database.read() as session:
        made = session.scalars(
            text("select relname from pg_class where relkind = 'r' and relname ~ '_20[0-9]{2}_'")
        ).all()
    database.close()
    assert len(made) == 12
    month = partitions.month_of(SystemClock().now())
    assert {month.of(table) for table in partitions.TABLES} <= set(made)
