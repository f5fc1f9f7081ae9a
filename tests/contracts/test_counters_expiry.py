"""In Redis, a reservation lasts as long as the money that it holds, and so do the sets that name it."""

from collections.abc import AsyncIterator

import pytest
import redis

from core.clock import FakeClock
from core.counters import BucketRequest, Cap, Hold, Slot
from core.counters_redis import RedisCounters
from tests.conftest import REDIS, need_redis
from tests.contracts.redis_keys import forget, new_prefix

DAY_S = 86_400


@pytest.fixture
async def counters(clock: FakeClock) -> AsyncIterator[RedisCounters]:
    need_redis()
    made = RedisCounters(REDIS, prefix=new_prefix(), clock=clock, timeout_s=10)
    yield made
    await made.close()
    forget(made._prefix)


class Keys:
    def __init__(self, counters: RedisCounters) -> None:
        self._base = f"{{{counters._prefix}:org}}"
        self._client = redis.Redis.from_url(REDIS, socket_timeout=10)

    def days_left(self, name: str) -> float:
        left = self._client.pttl(f"{self._base}:{name}")
        assert isinstance(left, int) and left > 0, f"{name} is gone or never expires"
        return left / 1000 / DAY_S

    def shorten(self, name: str) -> None:
        assert self._client.expire(f"{self._base}:{name}", 3_600)


def request_of(id: str) -> BucketRequest:
    hold = Hold(10, 10, (Cap("m", 1_000, 0),))
    return BucketRequest("org", id, 30_000, (), (Slot("s", 9),), hold)


async def test_a_reservation_lasts_as_long_as_its_money(
    counters: RedisCounters, clock: FakeClock
) -> None:
    keys = Keys(counters)
    await counters.reserve(request_of("a"))
    for step in ("reserved", "kept", "late"):
        assert keys.days_left("h:a") == pytest.approx(keys.days_left("c:m"), abs=0.001), step
        assert keys.days_left("l") > keys.days_left("h:a"), step
        if step == "reserved":
            await counters.keep("org", "a")
        clock.advance(31)
        await counters.holds("org", [])


async def test_changes_that_pay_nothing_leave_the_expiry(counters: RedisCounters) -> None:
    keys = Keys(counters)
    await counters.reserve(request_of("a"))
    keys.shorten("h:a")
    await counters.keep("org", "a")
    assert await counters.extend("org", "a", [], 0, 0) == 0
    assert keys.days_left("h:a") < 0.1
    assert await counters.extend("org", "a", [], 1, 1) == 1
    assert keys.days_left("h:a") > 39


async def test_a_renewal_that_is_the_days_first_call_extends_the_sets(
    counters: RedisCounters, clock: FakeClock
) -> None:
    keys = Keys(counters)
    clock.advance(DAY_S - clock.monotonic() % DAY_S - 10)
    await counters.reserve(request_of("a"))
    for name in ("l", "s:s"):
        keys.shorten(name)
    clock.advance(20)
    await counters.renew("org", ["a"], 30_000)
    await counters.reserve(request_of("b"))
    for name in ("l", "s:s"):
        assert keys.days_left(name) > 40
