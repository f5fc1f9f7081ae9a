"""Leases of shards at their borders: who takes what, how much, and for how long."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from billing.rating import shards
from billing.rating.tables import RatingShard, RatingWorker
from billing.usage import shard_keys
from billing.usage.tables import UsageBatch
from tests.billing.conftest import START

LEASE, MOMENT = timedelta(seconds=15), timedelta(microseconds=1)


@pytest.fixture
def sharded(session: Session) -> Session:
    """With the sixteen shards, none of which is leased."""
    known = set(session.scalars(select(RatingShard.shard)))
    session.add_all(RatingShard(shard=n) for n in range(16) if n not in known)
    session.execute(update(RatingShard).values(worker=None, leased_until=None))
    session.flush()
    return session


def _wait(session: Session, *found: int, events: int = 1) -> None:
    session.add_all(UsageBatch(recorded_at=START, events=events, shard=n) for n in found)
    session.flush()


def _held(session: Session) -> dict[int, Any]:
    session.expire_all()
    rows = session.scalars(select(RatingShard).where(RatingShard.worker.is_not(None)))
    return {row.shard: (row.worker, row.leased_until) for row in rows}


def test_a_tenant_s_shard_is_one_of_sixteen_and_stays() -> None:
    # The published check value of CRC-32 is that of the nine digits.
    found = {shard_keys.shard_of(f"org_{n}") for n in range(500)}
    assert found == set(range(16)) and shard_keys.shard_of("123456789") == 0xCBF43926 % 16
    assert shard_keys.SHARDS == 16 and shards.LEASE == LEASE


def test_a_worker_alone_takes_all_that_waits(sharded: Session) -> None:
    assert shards.claim(sharded, "a", START) == []
    _wait(sharded, 3, 5, 3)
    sharded.add(UsageBatch(recorded_at=START, events=1, shard=7, rated_at=START))
    assert shards.waiting(sharded) == {3, 5}
    assert shards.claim(sharded, "a", START) == [3, 5]
    assert _held(sharded) == {3: ("a", START + LEASE), 5: ("a", START + LEASE)}
    later = START + timedelta(seconds=9)
    assert shards.claim(sharded, "a", later) == [3, 5]
    assert _held(sharded)[3] == ("a", later + LEASE)
    sharded.execute(update(UsageBatch).where(UsageBatch.shard == 3).values(rated_at=START))
    assert shards.claim(sharded, "a", later) == [5]
    assert set(_held(sharded)) == {5}, "what waits no more is given back"


def test_workers_share_and_the_first_gives_what_exceeds_its_share(sharded: Session) -> None:
    _wait(sharded, 1, 2, 3, 4, 5)
    assert shards.claim(sharded, "a", START) == [1, 2, 3, 4, 5]
    assert shards.claim(sharded, "b", START) == [1, 2], "two of five exceed three"
    assert {n: worker for n, (worker, _) in _held(sharded).items()} == {
        1: "b",
        2: "b",
        3: "a",
        4: "a",
        5: "a",
    }
    assert shards.claim(sharded, "a", START) == [3, 4, 5]
    assert shards.claim(sharded, "c", START) == [3], "of two each, one of the three"
    assert shards.claim(sharded, "d", START) == []


@pytest.mark.parametrize(("late", "taken"), [(timedelta(0), []), (MOMENT, [4])])
def test_a_lease_that_ran_out_is_free(sharded: Session, late: timedelta, taken: list[int]) -> None:
    _wait(sharded, 4)
    assert shards.claim(sharded, "a", START) == [4]
    assert shards.claim(sharded, "b", START + LEASE + late) == taken


@pytest.mark.parametrize(("late", "others"), [(timedelta(0), 1), (MOMENT, 0)])
def test_a_worker_counts_while_its_lease_lasts(
    sharded: Session, late: timedelta, others: int
) -> None:
    assert shards._others(sharded, "a", START) == 0
    assert shards._others(sharded, "b", START + LEASE + late) == others
    assert shards._others(sharded, "b", START + LEASE + late) == others, "itself is none"


def test_a_worker_that_ended_long_ago_is_forgotten(sharded: Session) -> None:
    def _workers() -> set[str]:
        return set(sharded.scalars(select(RatingWorker.worker)))

    shards._others(sharded, "a", START)
    shards._others(sharded, "b", START + 101 * LEASE)
    assert _workers() == {"a", "b"}
    shards._others(sharded, "b", START + 101 * LEASE + MOMENT)
    assert _workers() == {"b"}


def test_what_is_held_is_the_worker_s_own(sharded: Session) -> None:
    _wait(sharded, 1, 2, 3)
    shards.claim(sharded, "a", START)
    sharded.execute(update(RatingShard).where(RatingShard.shard == 2).values(worker="b"))
    later = START + timedelta(seconds=4)
    assert sorted(shards.hold(sharded, "a", [1, 2], later)) == [1]
    held = _held(sharded)
    assert [held[n] for n in (1, 2, 3)] == [
        ("a", later + LEASE),
        ("b", START + LEASE),
        ("a", START + LEASE),
    ]
    shards.release(sharded, "a")
    assert set(_held(sharded)) == {2}
    assert list(sharded.scalars(select(RatingWorker.worker))) == []


def test_a_transaction_takes_the_oldest_and_at_most_half(sharded: Session) -> None:
    for shard, events in ((5, 4000), (2, 3000), (9, 9000), (2, 1000), (7, 50)):
        _wait(sharded, shard, events=events)
    leased = [2, 5, 7, 9]
    assert shards.next_part(sharded, leased, 20_000) == ([5, 2, 9], 8525)
    assert shards.next_part(sharded, leased, 4000) == ([5], 4000)
    assert shards.next_part(sharded, leased, 4001) == ([5, 2], 4001)
    assert shards.next_part(sharded, [2, 7], 20_000) == ([2, 7], 5000)
    assert shards.next_part(sharded, [], 20_000) == ([], 5000)
