"""The cache of checked keys: quick, never older than the epoch, alive while the database is not."""

from datetime import timedelta

import pytest

from core.clock import FakeClock
from core.database import Database
from core.errors import Unauthenticated
from core.tenants import keys
from core.tenants.bootstrap import DemoTenant, ensure_demo_tenant
from core.tenants.key_cache import KeyCache
from core.tenants.scope import scope_of_operator


@pytest.fixture
def demo(database: Database, clock: FakeClock) -> DemoTenant:
    with database.transaction() as session:
        return ensure_demo_tenant(session, clock)


def _revoke(database: Database, clock: FakeClock, demo: DemoTenant) -> None:
    with database.transaction() as session:
        keys.revoke(session, scope_of_operator(demo.tenant_id), clock, demo.key_id)


def test_a_revocation_reaches_every_worker_with_its_next_poll(
    database: Database, clock: FakeClock, demo: DemoTenant
) -> None:
    secret = demo.secret or ""
    workers = [KeyCache(database, clock) for _ in range(3)]
    for worker in workers:
        assert worker.cached(secret) is None
        worker.find(secret)
    assert all(worker.cached(secret) for worker in workers)
    _revoke(database, clock, demo)
    for worker in workers:
        worker.poll()
        assert worker.cached(secret) is None
        with pytest.raises(Unauthenticated, match="revoked"):
            worker.find(secret)


def test_a_poll_without_a_change_keeps_the_cache(
    sqlite_database: Database, clock: FakeClock
) -> None:
    with sqlite_database.transaction() as session:
        secret = ensure_demo_tenant(session, clock).secret or ""
    worker = KeyCache(sqlite_database, clock)
    worker.find(secret)
    worker.poll()
    assert worker.cached(secret) is not None


def test_a_cached_key_ends_with_its_time(sqlite_database: Database, clock: FakeClock) -> None:
    with sqlite_database.transaction() as session:
        demo = ensure_demo_tenant(session, clock)
        scope = scope_of_operator(demo.tenant_id)
        fresh = keys.rotate(session, scope, clock, demo.key_id, overlap=timedelta(minutes=1))
    worker = KeyCache(sqlite_database, clock)
    worker.find(demo.secret or "")
    worker.find(fresh.secret)
    clock.advance(minutes=1)
    with pytest.raises(Unauthenticated):
        worker.cached(demo.secret or "")
    assert worker.cached(fresh.secret) is not None


def test_last_use_is_written_in_one_batch(
    database: Database, clock: FakeClock, demo: DemoTenant
) -> None:
    worker = KeyCache(database, clock)
    worker.find(demo.secret or "")
    clock.advance(5)
    used = clock.now()
    worker.cached(demo.secret or "")
    assert worker.flush_used() == 1
    assert worker.flush_used() == 0
    with database.read() as session:
        key = keys.get(session, scope_of_operator(demo.tenant_id), demo.key_id)
    assert key.last_used_at == used


def test_a_typo_costs_no_query(clock: FakeClock) -> None:
    unreachable = Database("postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(Unauthenticated, match="Incorrect"):
        KeyCache(unreachable, clock).cached("th_" + "0" * 38)
