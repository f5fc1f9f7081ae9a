"""Wrong keys from one address: bounded, for that address alone, and only for a while."""

import pytest

from core.clock import FakeClock
from core.counters_memory import MemoryCounters
from core.errors import RateLimited
from gateway.auth.attempts import FailedAttempts


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
