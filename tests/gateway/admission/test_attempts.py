"""Wrong keys from one address: bounded, for that address alone, and only for a while."""

import pytest

from core.clock import FakeClock
from core.counters_memory import MemoryCounters
from core.errors import RateLimited
from gateway.edge.auth.attempts import FailedAttempts


async def test_guessing_is_bounded_per_address(clock: FakeClock) -> None:
    attempts = FailedAttempts(MemoryCounters(clock), clock, per_minute=10)
    for _ in range(10):
        await attempts.failed("203.0.113.7")
    with pytest.raises(RateLimited) as refused:
        await attempts.failed("203.0.113.7")
    with pytest.raises(RateLimited):
        attempts.check("::ffff:203.0.113.7")
    attempts.check("203.0.113.8")
    assert refused.value.retry_after_s is not None
    clock.advance(refused.value.retry_after_s)
    attempts.check("203.0.113.7")
    await attempts.failed("203.0.113.7")


async def test_one_ipv6_customer_is_one_address(clock: FakeClock) -> None:
    attempts = FailedAttempts(MemoryCounters(clock), clock, per_minute=2)
    await attempts.failed("2001:db8:0:1::1")
    await attempts.failed("2001:db8:0:1::2")
    with pytest.raises(RateLimited):
        await attempts.failed("2001:db8:0:1::3")
    await attempts.failed("2001:db8:0:2::1")


async def test_attempts_to_sign_in_count_in_all_processes_and_successes_do_not(
    clock: FakeClock,
) -> None:
    shared = MemoryCounters(clock)
    one, other = (FailedAttempts(shared, clock, per_minute=3) for _ in range(2))
    for _ in range(10):
        await one.give_back(await other.take("203.0.113.7"))
    for process in (one, other, one):
        await process.take("203.0.113.7")
    for process in (one, other):
        with pytest.raises(RateLimited):
            await process.take("203.0.113.7")
    await other.take("203.0.113.8")
