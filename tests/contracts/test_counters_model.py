"""Memory and Redis, driven by the same random calls, against one slow and obvious model.

The model counts in fractions and keeps every reservation in plain lists.
"""

import asyncio
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.clock import FakeClock
from core.counters import (
    KEPT_MS,
    BucketGrant,
    BucketRequest,
    BucketState,
    Cap,
    Counters,
    Hold,
    Slot,
    Take,
)
from core.counters_memory import MemoryCounters
from core.counters_redis import RedisCounters
from tests.conftest import REDIS, need_redis
from tests.contracts.redis_keys import forget, new_prefix

# (capacity, period): remainders, a rate below and one above a unit a millisecond.
BUCKETS = {"a": (7, 60_000), "b": (1_000, 3_600_000), "c": (90_000, 1_000)}
SLOTS = {"s": 2, "t": 3}
CAPS = {"m": 1_000, "n": 2_500}
_PREFIXES: list[str] = []


@dataclass
class _Held:
    takes: dict[str, tuple[int, int]]  # key -> (taken, keep)
    slots: list[str]
    caps: list[str]
    money: int
    ends: int
    live: bool = True
    kept: bool = False


@dataclass
class _Model:
    now: int = 0
    used: dict[str, Fraction] = field(default_factory=lambda: dict.fromkeys(BUCKETS, Fraction(0)))
    spent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAPS, 0))
    held: dict[str, _Held] = field(default_factory=dict)

    def advance(self, millis: int) -> None:
        """Millisecond by millisecond would be the definition; leases are the only events between."""
        end = self.now + millis
        while due := [h for h in self.held.values() if h.ends <= end]:
            self._refill(min(h.ends for h in due))
            self._lose()
        self._refill(end)

    def _refill(self, moment: int) -> None:
        for key, (capacity, period) in BUCKETS.items():
            gained = Fraction((moment - self.now) * capacity, period)
            self.used[key] = max(Fraction(0), self.used[key] - gained)
        self.now = moment

    def _lose(self) -> None:
        for id, held in list(self.held.items()):
            if held.ends > self.now:
                continue
            if not held.live or not held.kept or held.money == 0:
                del self.held[id]
            else:
                held.ends = self.now + KEPT_MS
            if not held.live:
                continue
            held.live = False
            for key, (taken, keep) in held.takes.items():
                self.change(key, min(0, keep - taken))
                held.takes[key] = (min(keep, taken), keep)

    def change(self, key: str, difference: int) -> None:
        self.used[key] = max(Fraction(0), self.used[key] + difference)

    def free(self, cap: str) -> int:
        money = sum(h.money for h in self.held.values() if cap in h.caps)
        return CAPS[cap] - self.spent[cap] - money

    def in_use(self, slot: str) -> int:
        return sum(h.live and slot in h.slots for h in self.held.values())

    def fits(self, bucket_request: BucketRequest) -> bool:
        # A bucket counts whole units: the part of a unit that has refilled is not there yet.
        buckets = all(
            -(-self.used[t.key] // 1) + t.amount <= t.capacity for t in bucket_request.takes
        )
        places = all(self.in_use(s.key) < s.limit for s in bucket_request.slots)
        money = bucket_request.hold is None or all(
            self.free(cap.key) >= bucket_request.hold.need for cap in bucket_request.hold.caps
        )
        return buckets and places and money


class CountersMachine(RuleBasedStateMachine):
    make = staticmethod(lambda clock: MemoryCounters(clock))

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.clock = FakeClock()
        self.counters: Counters = self.make(self.clock)
        self.model = _Model()
        self.number = 0

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run_until_complete(self.counters.close())
            self.loop.close()

    @rule(
        takes=st.fixed_dictionaries(
            {}, optional={key: st.integers(0, most // 2) for key, (most, _) in BUCKETS.items()}
        ),
        slots=st.sets(st.sampled_from(sorted(SLOTS))),
        money=st.one_of(st.none(), st.tuples(st.integers(0, 400), st.integers(0, 900))),
        caps=st.sets(st.sampled_from(sorted(CAPS)), min_size=1),
        lease=st.integers(1, 9_000),
        keep_permille=st.integers(0, 1000),
    )
    def reserve(
        self,
        takes: dict[str, int],
        slots: set[str],
        money: tuple[int, int] | None,
        caps: set[str],
        lease: int,
        keep_permille: int,
    ) -> None:
        self.number += 1
        bucket_request = BucketRequest(
            "org",
            f"req_{self.number}",
            lease,
            tuple(
                Take(key, *BUCKETS[key], amount, amount * keep_permille // 1000)
                for key, amount in takes.items()
            ),
            tuple(Slot(key, SLOTS[key]) for key in sorted(slots)),
            Hold(money[0], sum(money), tuple(Cap(key, CAPS[key], 0) for key in sorted(caps)))
            if money
            else None,
        )
        fits = self.model.fits(bucket_request)
        answer = self.loop.run_until_complete(self.counters.reserve(bucket_request))
        assert isinstance(answer, BucketGrant) == fits
        if not isinstance(answer, BucketGrant):
            self._compare(answer.buckets)
            return
        held = (
            min(bucket_request.hold.want, *(self.model.free(key) for key in caps))
            if bucket_request.hold
            else 0
        )
        assert answer.held == held
        for take in bucket_request.takes:
            self.model.change(take.key, take.amount)
        self.model.held[bucket_request.id] = _Held(
            {take.key: (take.amount, take.keep) for take in bucket_request.takes},
            sorted(slots),
            sorted(caps) if bucket_request.hold else [],
            held,
            self.model.now + lease,
        )
        assert answer.slots_used == tuple(self.model.in_use(key) for key in sorted(slots))
        self._compare(answer.buckets)

    def _compare(self, buckets: tuple[BucketState, ...]) -> None:
        for state in buckets:
            used = self.model.used[state.key]
            assert state.remaining == max(0, state.capacity - -(-used // 1))
            full = used * state.period_ms / state.capacity
            assert state.reset_ms == -(-full // 1)

    @rule(
        pick=st.integers(0, 50), permille=st.integers(0, 2_000), spent_permille=st.integers(0, 1000)
    )
    def settle(self, pick: int, permille: int, spent_permille: int) -> None:
        if not self.model.held:
            assert not self.loop.run_until_complete(self.counters.settle("org", "none", [], 0))
            return
        id = sorted(self.model.held)[pick % len(self.model.held)]
        held = self.model.held.pop(id)
        amounts = [taken * permille // 1000 for taken, _ in held.takes.values()]
        spent = held.money * spent_permille // 1000
        assert self.loop.run_until_complete(self.counters.settle("org", id, amounts, spent))
        for (key, (taken, _)), amount in zip(held.takes.items(), amounts, strict=True):
            self.model.change(key, amount - taken)
        for cap in held.caps:
            self.model.spent[cap] += spent

    @rule(pick=st.integers(0, 50), need=st.integers(0, 300), more=st.integers(0, 600))
    def extend(self, pick: int, need: int, more: int) -> None:
        if not self.model.held:
            return
        id = sorted(self.model.held)[pick % len(self.model.held)]
        held = self.model.held[id]
        amounts = [taken + 3 for taken, _ in held.takes.values()]
        got = self.loop.run_until_complete(
            self.counters.extend("org", id, amounts, need, need + more)
        )
        for key, (taken, keep) in list(held.takes.items()):
            self.model.change(key, 3)
            held.takes[key] = (taken + 3, keep)
        most = min([need + more, *(self.model.free(cap) for cap in held.caps)])
        expected = most if held.caps and most >= max(need, 1) else 0
        assert got == expected
        held.money += expected

    @rule(pick=st.integers(0, 50), lease=st.integers(1, 40_000))
    def renew(self, pick: int, lease: int) -> None:
        ids = sorted(self.model.held)
        chosen = ids[pick % len(ids)] if ids else "none"
        self.loop.run_until_complete(self.counters.renew("org", [chosen], lease))
        held = self.model.held.get(chosen)
        if held is not None and held.live:
            held.ends = self.model.now + lease

    @rule(pick=st.integers(0, 50))
    def keep(self, pick: int) -> None:
        ids = sorted(self.model.held)
        chosen = ids[pick % len(ids)] if ids else "none"
        self.loop.run_until_complete(self.counters.keep("org", chosen))
        if ids:
            self.model.held[chosen].kept = True

    @rule()
    def look(self) -> None:
        """What each cap holds is the sum over the reservations that live."""
        for found in self.loop.run_until_complete(self.counters.holds("org", sorted(CAPS))):
            expected = sum(h.money for h in self.model.held.values() if found.key in h.caps)
            assert found.held == found.reserved == expected

    @rule(millis=st.one_of(st.integers(1, 50), st.integers(1, 9_000), st.just(KEPT_MS)))
    def advance(self, millis: int) -> None:
        self.clock.advance(millis / 1000)
        self.model.advance(millis)

    @invariant()
    def money_stays_within_its_caps(self) -> None:
        if hasattr(self, "model"):
            assert all(self.model.free(cap) >= 0 for cap in CAPS)


def _redis(clock: FakeClock) -> RedisCounters:
    prefix = new_prefix()
    _PREFIXES.append(prefix)
    return RedisCounters(REDIS, prefix=prefix, clock=clock, timeout_s=10)


_LIMITS = settings(
    max_examples=60,
    stateful_step_count=40,
    phases=[Phase.generate],  # a long sequence shrinks for minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def _run(machine: type[CountersMachine]) -> None:
    case = machine.TestCase
    case.settings = _LIMITS
    case("runTest").runTest()


def test_memory_follows_the_model() -> None:
    _run(CountersMachine)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_redis_follows_the_model() -> None:
    need_redis()

    class OnRedis(CountersMachine):
        make = staticmethod(_redis)

    try:
        _run(OnRedis)
    finally:
        for prefix in _PREFIXES:
            forget(prefix)
