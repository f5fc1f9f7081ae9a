"""Rating workers share the tenants by leased shards; whatever becomes of a lease, all is charged once."""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, text

from billing.audit import reconcile
from billing.rating import rating, shards
from billing.rating.rating_worker import rate_all
from billing.rating.tables import RatingShard, RatingWorker
from billing.usage import shard_keys
from billing.usage.tables import Charge, UsageBatch
from core.clock import FakeClock, SystemClock
from core.database import Database
from tests.billing.conftest import Deployment, deployment_of

TENANTS = [f"org_{number}" for number in range(40)]


@pytest.fixture
def shared(postgres_database: Database, clock: FakeClock) -> Iterator[Deployment]:
    made = deployment_of(postgres_database, clock)
    for name in TENANTS:
        made.tenant(name)
    yield made


def fill(deployment: Deployment, rounds: int, of_each: int = 1) -> int:
    """Events of every tenant."""
    for _ in range(rounds):
        deployment.record(
            *(deployment.event(tenant_id=name) for name in TENANTS for _ in range(of_each))
        )
    return rounds * of_each * len(TENANTS)


def charged(database: Database) -> Counter[str]:
    with database.read() as session:
        found = select(Charge.tenant_id, func.count()).group_by(Charge.tenant_id)
        return Counter({row[0]: row[1] for row in session.execute(found)})


def leases(database: Database) -> dict[int, str]:
    with database.read() as session:
        rows = session.scalars(select(RatingShard).where(RatingShard.worker.is_not(None)))
        return {row.shard: row.worker or "" for row in rows}


def claim(deployment: Deployment, worker: str) -> list[int]:
    with deployment.database.transaction() as session:
        return shards.claim(session, worker, deployment.clock.now())


def clean(database: Database) -> None:
    with database.read() as session:
        report = reconcile.audit(session)
    assert report.clean, report.as_json()


def test_a_transaction_rates_the_oldest_batch_s_shard_first_and_no_shard_waits_for_ever(
    deployment: Deployment,
) -> None:
    """The fewer tenants it has, the fewer roll-ups and accounts it writes for the same events."""
    for name in TENANTS:
        deployment.tenant(name)
    fill(deployment, rounds=3)

    def _waiting() -> list[tuple[int, int]]:
        with deployment.database.read() as session:
            query = select(UsageBatch.id, UsageBatch.shard).where(UsageBatch.rated_at.is_(None))
            return [(row[0], row[1]) for row in session.execute(query.order_by(UsageBatch.id))]

    seen = []
    while waiting := _waiting():
        with deployment.database.transaction() as session:
            rating.rate(session, deployment.clock, most_events=3 * _largest(deployment))
        left = _waiting()
        rated = [each for each in waiting if each not in left]
        oldest = waiting[0][1]
        assert [each for each in waiting if each[1] == oldest] == [
            each for each in rated if each[1] == oldest
        ]
        assert len({shard for _, shard in rated}) < len({shard for _, shard in waiting}) or not left
        seen += rated
    assert len(seen) == 3 * len({shard for _, shard in seen})
    assert charged(deployment.database) == Counter(dict.fromkeys(TENANTS, 3))
    clean(deployment.database)


def _largest(deployment: Deployment) -> int:
    with deployment.database.read() as session:
        return session.scalar(select(func.max(UsageBatch.events))) or 0


def test_a_worker_that_stands_still_in_a_transaction_holds_up_no_other(
    shared: Deployment,
) -> None:
    """It may have locked any lease, and be forgetting a worker that ended long ago."""
    fill(shared, rounds=1)
    database, now = shared.database, shared.clock.now()
    with database.transaction() as session:
        session.add(RatingWorker(worker="ended", alive_until=now - timedelta(days=1)))
    leased = claim(shared, "ann")
    with database.transaction() as still:
        still.execute(text("delete from rating_workers where worker = 'ended'"))
        locked = leased[: len(leased) // 2]
        query = select(RatingShard).where(RatingShard.shard.in_(locked))
        assert still.scalars(query.with_for_update()).all()
        with database.transaction() as session:
            session.execute(text("set local lock_timeout = '2s'"))
            assert set(shards.claim(session, "ann", now)) == set(leased) - set(locked)
            held = shards.hold(session, "ann", leased, now)
            assert set(held) == set(leased) - set(locked)
            assert rating.rate(session, shared.clock, shards=held).events > 0
    with database.transaction() as session:
        shards.release(session, "ann")
    assert rate_all(database, shared.clock) > 0
    assert charged(database) == Counter(dict.fromkeys(TENANTS, 1))
    clean(database)


def test_a_batch_holds_one_shard_and_counts_what_is_new(deployment: Deployment) -> None:
    for name in TENANTS:
        deployment.tenant(name)
    events = [deployment.event(tenant_id=name) for name in TENANTS]
    assert deployment.record(*events[:10]) == 10
    assert deployment.record(*events) == 30
    assert deployment.record(*events) == 0
    with deployment.database.read() as session:
        query = text(
            "select b.id, b.shard, b.events, e.tenant_id from usage_batches b"
            " left join usage_events e on e.batch_id = b.id"
        )
        rows = session.execute(query).all()
    assert all(row[1] == shard_keys.shard_of(row[3]) for row in rows)
    assert Counter(row[0] for row in rows) == {row[0]: row[2] for row in rows}
    assert len({row[1] for row in rows}) > 8, "forty tenants are in many shards"


def test_two_workers_take_a_half_each_and_one_that_came_first_gives(shared: Deployment) -> None:
    fill(shared, 1)
    with shared.database.read() as session:
        waiting = shards.waiting(session)
    assert set(claim(shared, "first")) == waiting, "one alone takes all"
    given = set(claim(shared, "second"))
    assert given, "it need not wait until the first one gives"
    kept = set(claim(shared, "first"))
    assert kept | given == waiting and not kept & given
    assert abs(len(kept) - len(given)) <= 1
    assert set(claim(shared, "second")) == given and set(claim(shared, "first")) == kept
    with shared.database.transaction() as session:
        shards.release(session, "second")
    assert set(claim(shared, "first")) == waiting
    with shared.database.transaction() as session:
        shards.release(session, "first")
        assert session.scalar(select(func.count()).select_from(RatingWorker)) == 0
    assert leases(shared.database) == {}


def test_a_worker_in_its_first_transaction_leaves_half_to_the_next(
    shared: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that waits is less than a transaction may rate."""
    monkeypatch.setattr(shards, "_SHARED_FROM", 1)
    total = fill(shared, rounds=2)
    beside: list[int] = []
    plain = rating._rate_events

    def _second_worker_comes(*given: Any) -> int:
        if not beside:
            beside.append(0)
            beside[0] = rate_all(shared.database, shared.clock, patience_s=0)
        return plain(*given)

    monkeypatch.setattr(rating, "_rate_events", _second_worker_comes)
    first = rate_all(shared.database, shared.clock)
    assert first + beside[0] == total
    assert beside[0] > total // 4
    assert set(charged(shared.database).values()) == {2}
    clean(shared.database)


def test_a_lost_lease_is_not_used_and_nothing_is_charged_twice(shared: Deployment) -> None:
    total = fill(shared, 2)
    own = claim(shared, "slow")
    shared.clock.advance(seconds=shards.LEASE.total_seconds() + 1)
    taken = claim(shared, "quick")
    assert taken == own, "its leases had run out"
    with shared.database.transaction() as session:
        assert shards.hold(session, "slow", own, shared.clock.now()) == []
        assert rating.rate(session, shared.clock, shards=[]).events == 0
    with shared.database.transaction() as session:
        held = shards.hold(session, "quick", taken, shared.clock.now())
        assert rating.rate(session, shared.clock, shards=held).events == total
    assert set(charged(shared.database).values()) == {2}
    clean(shared.database)


def test_a_lease_that_runs_out_during_work_is_not_taken_from_the_transaction(
    shared: Deployment,
) -> None:
    total = fill(shared, 1)
    own = claim(shared, "slow")
    with shared.database.transaction() as session:
        held = shards.hold(session, "slow", own, shared.clock.now())
        shared.clock.advance(seconds=shards.LEASE.total_seconds() + 1)
        assert claim(shared, "quick") == [], "the leases are locked by running work"
        assert rating.rate(session, shared.clock, shards=held).events == total
    assert set(charged(shared.database).values()) == {1}
    clean(shared.database)


def test_a_rating_that_fails_leaves_its_shards_to_the_next(shared: Deployment) -> None:
    total = fill(shared, 1)
    own = claim(shared, "failing")
    with pytest.raises(RuntimeError), shared.database.transaction() as session:
        shards.hold(session, "failing", own, shared.clock.now())
        rating.rate(session, shared.clock, shards=own)
        raise RuntimeError("the disk of the database is full")
    assert charged(shared.database) == {}
    some = rate_all(shared.database, shared.clock, patience_s=0)
    assert 0 < some < total, "its share is alive"
    shared.clock.advance(seconds=shards.LEASE.total_seconds() + 1)
    assert rate_all(shared.database, shared.clock, patience_s=0) == total - some
    assert leases(shared.database) == {}
    clean(shared.database)


def test_workers_that_believe_to_own_the_same_shards_charge_once(shared: Deployment) -> None:
    total = fill(shared, 6)

    def _rate(_: int) -> int:
        events = 0
        while True:
            with shared.database.transaction() as session:
                rated = rating.rate(session, shared.clock, most_events=20, shards=range(16))
            if not rated.batches:
                return events
            events += rated.events

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(_rate, range(4))) == total
    assert set(charged(shared.database).values()) == {6}
    clean(shared.database)


def test_many_workers_at_once_rate_everything(shared: Deployment) -> None:
    total = fill(shared, 10)
    with ThreadPoolExecutor(4) as pool:
        rated = list(pool.map(lambda _: rate_all(shared.database, shared.clock), range(4)))
    assert sum(rated) == total
    assert set(charged(shared.database).values()) == {10}
    assert leases(shared.database) == {}
    clean(shared.database)


def test_a_worker_killed_with_leases_loses_and_doubles_nothing(
    postgres_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes are killed with -9 while they rate; another takes their shards over."""
    made = deployment_of(postgres_database, FakeClock(SystemClock().now()))
    for name in TENANTS:
        made.tenant(name)
    total = fill(made, 15, of_each=5)
    for _ in range(3):
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.billing.rating.test_shards", postgres_database.url],
            stdout=subprocess.PIPE,
        )
        assert worker.stdout is not None and worker.stdout.readline() == b"rating\n"
        worker.send_signal(signal.SIGKILL)
        worker.wait(30)
        worker.stdout.close()
        assert leases(postgres_database), "it held leases"
        with postgres_database.transaction() as session:  # instead of waiting for their end
            past = SystemClock().now() - timedelta(minutes=1)
            session.execute(text("update rating_shards set leased_until = :past"), {"past": past})
            session.execute(text("update rating_workers set alive_until = :past"), {"past": past})
    before = sum(charged(postgres_database).values())
    assert before < total, "something was left to do"
    assert rate_all(postgres_database, SystemClock()) == total - before
    assert set(charged(postgres_database).values()) == {15 * 5}
    with postgres_database.read() as session:
        assert not session.scalars(select(UsageBatch.id).where(UsageBatch.rated_at.is_(None))).all()
    clean(postgres_database)


def _rate_slowly(url: str) -> None:
    """In the child: says so when it is in the middle of its second rating transaction."""
    plain, calls = rating._post, 0

    def _post(*given: object) -> None:
        nonlocal calls
        plain(*given)  # type: ignore[arg-type]
        calls += 1
        if calls == 2:
            sys.stdout.write("rating\n")
            sys.stdout.flush()
            time.sleep(60)

    rating._post = _post  # type: ignore[assignment]
    claim_batches = rating.claim_batches

    def _few(session: object, *waiting: object, most_events: int) -> list[int]:
        return claim_batches(session, *waiting, most_events=200)  # type: ignore[arg-type]

    rating.claim_batches = _few
    rate_all(Database(url), SystemClock())


if __name__ == "__main__":
    _rate_slowly(sys.argv[1])
