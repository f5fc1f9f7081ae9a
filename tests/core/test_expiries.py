"""Expiries beside a plain list; a lease that is given back leaves nothing."""

import random

from core.clock import FakeClock
from core.counters import BucketRequest
from core.counters_memory import MemoryCounters
from core.expiries import Expiries


def test_keys_end_in_the_order_of_their_times_as_in_a_list() -> None:
    for seed in range(60):
        chance, kept, now = random.Random(seed), Expiries(), 0
        listed: dict[tuple[str, str], int] = {}
        for number in range(120):
            now += chance.randrange(400)
            key, at = ("org", f"{number:03d}"), now + chance.choice((1, 999, 2_000, 30_000))
            kept.add(key, at)
            listed[key] = at
            for other in chance.sample(sorted(listed), min(2, len(listed))):
                if chance.random() < 0.4:
                    kept.remove(other, listed.pop(other))
            ended = sorted((at, key) for key, at in listed.items() if at <= now)
            assert kept.soonest <= min(listed.values(), default=kept.soonest)
            assert list(kept.due(now)) == [key for _, key in ended]
            for _, key in ended:
                del listed[key]
            assert len(kept) == len(listed)
        rest = sorted((at, key) for key, at in listed.items())
        assert list(kept.due(now + 30_000)) == [key for _, key in rest]
        assert len(kept) == 0 and kept.soonest > now


def test_another_time_or_key_removes_nothing() -> None:
    kept = Expiries()
    kept.add(("a", "1"), 1_500)
    kept.remove(("a", "1"), 2_500)
    kept.remove(("a", "2"), 1_500)
    assert list(kept.due(1_499)) == []
    assert list(kept.due(1_500)) == [("a", "1")]


def test_what_is_added_while_keys_end_may_end_too() -> None:
    kept = Expiries()
    kept.add(("a", "1"), 1_000)
    found = []
    for key in kept.due(5_000):
        found.append(key)
        if key == ("a", "1"):
            kept.add(("a", "2"), 4_000)
            kept.add(("a", "3"), 6_000)
    assert found == [("a", "1"), ("a", "2")]
    assert len(kept) == 1


async def test_settled_reservations_leave_no_lease_behind() -> None:
    """A gateway answers thousands a second, and a lease is thirty seconds."""
    clock = FakeClock()
    counters = MemoryCounters(clock)
    for number in range(500):
        clock.advance(0.001)
        await counters.reserve(BucketRequest("org", str(number), 30_000))
        await counters.renew("org", [str(number)], 30_000)
        assert await counters.settle("org", str(number), (), 0)
    assert len(counters._leases) == 0
