"""The pool against a plain model of it, and the cache's floors and caps."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.blocks import BlockPool
from engine.errors import IntegrityError


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def fill(pool: BlockPool, owner: str, keys: range) -> list[int]:
    """Cache one idle block for each key, in order."""
    blocks = pool.allocate(len(keys), owner)
    assert blocks is not None
    for block, number in zip(blocks, keys, strict=True):
        pool.cache(block, key(number), owner, None)
        pool.release([block])
    return blocks


def cached(pool: BlockPool, keys: range) -> list[int]:
    return [number for number in keys if pool.find(key(number)) is not None]


@given(st.integers(0, 10_000), st.sampled_from([0, 1, 3]), st.sampled_from([None, 2, 5]))
@settings(max_examples=60)
def test_random_use_keeps_the_books(seed: int, floor: int, cap: int | None) -> None:
    if cap is not None and cap < floor:
        cap = floor
    dice = random.Random(seed)
    pool = BlockPool(12, 4, floor=floor, cap=cap)
    held: list[list[int]] = []
    names = iter(range(1000))
    for _ in range(120):
        owner = dice.choice("abc")
        action = dice.randrange(4)
        if action == 0:
            before = pool.available(owner)
            want = dice.randrange(1, 5)
            got = pool.allocate(want, owner)
            assert (got is not None) == (want <= before)
            if got:
                assert len(set(got)) == want
                held.append(got)
        elif action == 1 and held:
            pool.release(reversed(held.pop(dice.randrange(len(held)))))
        elif action == 2 and held:
            pool.cache(dice.choice(dice.choice(held)), key(next(names)), owner, None)
        elif action == 3:
            found = pool.find(key(dice.randrange(30)))
            if found is not None:
                pool.share(found)
                held.append([found])
        pool.check_integrity(block for table in held for block in table)
        if cap is not None:
            assert all(pool.cached_blocks(o) <= cap for o in "abc")
    for table in held:
        pool.release(table)
    assert pool.free_blocks == 12
    assert pool.available("nobody", force=True) == 12


def test_the_least_recently_used_goes_first_and_a_hit_renews() -> None:
    pool = BlockPool(4, 4)
    fill(pool, "a", range(4))
    block = pool.find(key(0))
    assert block is not None
    pool.share(block)
    pool.release([block])
    taken = pool.allocate(2, "a")
    assert cached(pool, range(4)) == [0, 3]
    assert taken is not None


def test_tails_are_given_up_before_heads() -> None:
    pool = BlockPool(3, 4)
    table = pool.allocate(3, "a")
    for number, block in enumerate(table):
        pool.cache(block, key(number), "a", None)
    pool.release(reversed(table))
    pool.allocate(1, "a")
    assert cached(pool, range(3)) == [0, 1]


def test_a_noisy_tenant_cannot_empty_a_quiet_ones_cache() -> None:
    pool = BlockPool(10, 4, floor=3)
    fill(pool, "quiet", range(5))
    taken = pool.allocate(7, "noisy")
    assert taken is not None
    assert cached(pool, range(5)) == [2, 3, 4]
    assert pool.available("noisy") == 0
    assert pool.allocate(1, "noisy") is None
    assert pool.available("quiet") == 3
    assert pool.allocate(1, "noisy", force=True) is not None  # rather than stop the engine


def test_floors_bind_half_of_the_pool_at_most() -> None:
    pool = BlockPool(8, 4, floor=2)
    for number, tenant in enumerate("abcd"):
        fill(pool, tenant, range(number * 2, number * 2 + 2))
    assert pool.available("newcomer") == 4


def test_a_tenant_keeps_no_more_than_its_cap() -> None:
    pool = BlockPool(10, 4, cap=3)
    fill(pool, "a", range(6))
    assert cached(pool, range(6)) == [3, 4, 5]
    assert pool.free_blocks == 10


def test_the_same_content_twice_keeps_its_first_block() -> None:
    pool = BlockPool(4, 4)
    one, two = pool.allocate(2, "a")
    pool.cache(one, key(1), "a", None)
    pool.cache(two, key(1), "a", None)
    assert pool.find(key(1)) == one
    pool.release([two, one])
    pool.check_integrity([])


def test_a_shared_or_cached_block_is_not_writable() -> None:
    pool = BlockPool(4, 4)
    (block,) = pool.allocate(1, "a")
    assert pool.writable(block)
    pool.share(block)
    assert not pool.writable(block)
    pool.release([block])
    pool.cache(block, key(1), "a", None)
    assert not pool.writable(block)


def test_wrong_books_are_found() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(2, "a")
    with pytest.raises(IntegrityError, match="holders"):
        pool.check_integrity([table[0]])
    pool.release(table)
    with pytest.raises(IntegrityError, match="more often"):
        pool.release([table[0]])


def test_events_tell_what_came_and_went() -> None:
    pool = BlockPool(2, 4)
    pool.events = []
    fill(pool, "a", range(2))
    pool.allocate(1, "a")
    assert [(e.kind, e.hashes) for e in pool.events] == [
        ("stored", [key(0).hex()]),
        ("stored", [key(1).hex()]),
        ("removed", [key(0).hex()]),
    ]
