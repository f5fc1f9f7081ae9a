"""What counters in memory and in Redis do alike, to the unit and to the millisecond."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from core.clock import FakeClock
from core.counters import (
    KEPT_MS,
    BucketGrant,
    BucketRequest,
    Cap,
    Counters,
    Denial,
    HeldMoney,
    Hold,
    Slot,
    Take,
)
from core.counters_memory import MemoryCounters
from core.counters_redis import RedisCounters
from tests.conftest import REDIS, need_redis
from tests.contracts.redis_keys import forget, new_prefix

MINUTE = 60_000


@pytest.fixture(params=["memory", "redis"])
async def counters(request: pytest.FixtureRequest, clock: FakeClock) -> AsyncIterator[Counters]:
    if request.param == "memory":
        yield MemoryCounters(clock)
        return
    need_redis()
    prefix = new_prefix()
    # Patient: a loaded machine is not what this suite is about.
    made = RedisCounters(REDIS, prefix=prefix, clock=clock, timeout_s=10)
    yield made
    await made.close()
    forget(prefix)


Make = Callable[..., BucketRequest]


@pytest.fixture
def bucket_request() -> Make:
    numbers = iter(range(1, 10**6))

    def _make(
        *takes: Take,
        slots: tuple[Slot, ...] = (),
        hold: Hold | None = None,
        id: str = "",
        lease_ms: int = 30_000,
        group: str = "org_a",
    ) -> BucketRequest:
        return BucketRequest(group, id or f"req_{next(numbers)}", lease_ms, takes, slots, hold)

    return _make


def _take(amount: int, capacity: int = 10, key: str = "k", keep: int | None = None) -> Take:
    return Take(key, capacity, MINUTE, amount, amount if keep is None else keep)


async def _granted(counters: Counters, bucket_request: BucketRequest) -> BucketGrant:
    answer = await counters.reserve(bucket_request)
    assert isinstance(answer, BucketGrant), answer
    return answer


async def _denied(counters: Counters, bucket_request: BucketRequest) -> Denial:
    answer = await counters.reserve(bucket_request)
    assert isinstance(answer, Denial), answer
    return answer


async def test_a_bucket_gives_its_capacity_and_refills_continuously(
    counters: Counters, clock: FakeClock, bucket_request: Make
) -> None:
    for left in range(9, -1, -1):
        assert (await _granted(counters, bucket_request(_take(1)))).buckets[0].remaining == left
    denial = await _denied(counters, bucket_request(_take(1)))
    assert denial.wait_ms == 6_000
    assert denial.buckets[0].reset_ms == MINUTE
    clock.advance(5.999)
    assert (await _denied(counters, bucket_request(_take(1)))).wait_ms == 1
    clock.advance(0.001)
    await _granted(counters, bucket_request(_take(1)))
    clock.advance(60)
    assert (await _granted(counters, bucket_request(_take(10)))).buckets[0].remaining == 0


async def test_a_bucket_that_two_limits_share_keeps_at_least_what_was_used(
    counters: Counters, bucket_request: Make
) -> None:
    """A limit of every project and one of this project have the same key."""
    for used, most_left in ((4, 16), (0, 16)):
        asked = bucket_request(_take(6, 20, keep=0), _take(6, 15, keep=0))
        await _granted(counters, asked)
        assert await counters.settle("org_a", asked.id, [used, used], 0)
        probe = await _granted(counters, bucket_request(_take(0, 20)))
        assert 8 <= probe.buckets[0].remaining <= most_left


async def test_refill_drifts_by_nothing_over_many_small_steps(
    counters: Counters, clock: FakeClock, bucket_request: Make
) -> None:
    """7 a minute is no whole number of milliseconds a unit: remainders must be carried."""
    await _granted(counters, bucket_request(_take(7, 7)))
    for _ in range(300):
        clock.advance(0.199)
        await counters.reserve(bucket_request(_take(0, 7)))
    clock.advance(0.299)
    assert (await _denied(counters, bucket_request(_take(7, 7)))).wait_ms == 1
    clock.advance(0.001)
    await _granted(counters, bucket_request(_take(7, 7)))


async def test_large_figures_stay_exact(
    counters: Counters, clock: FakeClock, bucket_request: Make
) -> None:
    capacity = 999_999_999_937
    day = Take("day", capacity, 86_400_000, capacity, capacity)
    await _granted(counters, bucket_request(day))
    one = Take("day", capacity, 86_400_000, 11_574, 11_574)
    assert (await _denied(counters, bucket_request(one))).wait_ms == 1
    clock.advance(0.001)
    assert (await _granted(counters, bucket_request(one))).buckets[0].remaining == 0
    clock.advance(86_399.999)
    last = (
        await counters.reserve(bucket_request(Take("day", capacity, 86_400_000, 0, 0)))
    ).buckets[0]
    assert (last.remaining, last.reset_ms) == (capacity - 11_574, 1)


async def test_all_or_nothing_over_every_kind_of_scope(
    counters: Counters, bucket_request: Make
) -> None:
    full = Slot("full", 0)
    roomy = Slot("roomy", 5)
    hold = Hold(10, 10, (Cap("m", 100, 0),))
    for _ in range(20):
        denial = await _denied(counters, bucket_request(_take(1), slots=(roomy, full), hold=hold))
        assert denial.keys == ("full",)
    poor = Hold(101, 200, (Cap("m", 100, 0),))
    for _ in range(20):
        denial = await _denied(counters, bucket_request(_take(1), slots=(roomy,), hold=poor))
        assert (denial.money, denial.affordable) == (("m",), 100)
    grant = await _granted(
        counters, bucket_request(_take(10), slots=(roomy,), hold=Hold(100, 100, hold.caps))
    )
    assert (grant.buckets[0].remaining, grant.slots_used, grant.held) == (0, (1,), 100)


async def test_what_never_fits_says_so(counters: Counters, bucket_request: Make) -> None:
    denial = await _denied(counters, bucket_request(_take(11)))
    assert denial.wait_ms is None and denial.keys == ("k",)


async def test_the_same_id_takes_once(counters: Counters, bucket_request: Make) -> None:
    hold = Hold(1, 7, (Cap("m", 10, 0),))
    first = await _granted(
        counters, bucket_request(_take(4), slots=(Slot("s", 1),), hold=hold, id="req_x")
    )
    again = await _granted(
        counters, bucket_request(_take(4), slots=(Slot("s", 1),), hold=hold, id="req_x")
    )
    assert again == first
    assert (await _granted(counters, bucket_request(_take(6)))).buckets[0].remaining == 0


async def test_settling_returns_or_charges_the_difference(
    counters: Counters, bucket_request: Make
) -> None:
    await _granted(counters, bucket_request(_take(8), id="less"))
    assert await counters.settle("org_a", "less", [3], 0)
    assert not await counters.settle("org_a", "less", [3], 0)
    await _granted(counters, bucket_request(_take(1), id="more"))
    await counters.settle("org_a", "more", [20], 0)
    denial = await _denied(counters, bucket_request(_take(1)))
    assert (denial.buckets[0].remaining, denial.wait_ms) == (0, 84_000)


async def test_a_reservation_may_take_several_slots(
    counters: Counters, clock: FakeClock, bucket_request: Make
) -> None:
    three, two = (Slot("s", 4, count=3),), (Slot("s", 4, count=2),)
    first = await _granted(counters, bucket_request(slots=three, id="first", lease_ms=5_000))
    assert first.slots_used == (3,)
    assert (await _denied(counters, bucket_request(slots=two))).slots_used == (3,)
    await _granted(counters, bucket_request(slots=(Slot("s", 4),), id="one", lease_ms=60_000))
    clock.advance(4)
    await counters.renew("org_a", ["first"], 5_000)
    clock.advance(2)
    assert (await _denied(counters, bucket_request(slots=two))).keys == ("s",)
    await counters.settle("org_a", "first", [], 0)
    await _granted(counters, bucket_request(slots=two, id="two", lease_ms=5_000))
    assert (await _denied(counters, bucket_request(slots=two))).slots_used == (3,)
    clock.advance(6)
    await _granted(counters, bucket_request(slots=three, id="last", lease_ms=5_000))


async def test_slots_come_back_with_the_lease(
    counters: Counters, clock: FakeClock, bucket_request: Make
) -> None:
    two = (Slot("s", 2),)
    await _granted(counters, bucket_request(slots=two, id="dead", lease_ms=5_000))
    await _granted(counters, bucket_request(slots=two, id="alive", lease_ms=5_000))
    clock.advance(4)
    await counters.renew("org_a", ["alive"], 5_000)
    assert (await _denied(counters, bucket_request(slots=two))).keys == ("s",)
    clock.advance(1)
    await _granted(counters, bucket_request(slots=two, id="next", lease_ms=60_000))
    assert (await _denied(counters, bucket_request(slots=two))).slots_used == (2,)
    await counters.renew("org_a", ["dead"], 60_000)
    await counters.settle("org_a", "alive", [], 0)
    await _granted(counters, bucket_request(slots=two))


async def test_a_lost_lease_gives_back_what_is_above_keep(
    counters: Counters, clock: FakeClock, bucket_request: Make
) -> None:
    day = Take("day", 1_000, 86_400_000, 900, keep=100)
    await _granted(counters, bucket_request(day, lease_ms=1_000, id="dead"))
    clock.advance(1)
    probe = Take("day", 1_000, 86_400_000, 0, 0)
    assert (await _granted(counters, bucket_request(probe))).buckets[0].remaining == 900
    assert not await counters.settle("org_a", "dead", [100], 0)


async def test_a_settlement_after_the_lease_counts_from_what_was_kept(
    counters: Counters, clock: FakeClock, bucket_request: Make
) -> None:
    day = Take("day", 1_000, 86_400_000, 900, keep=100)
    hold = Hold(5, 5, (Cap("m", 100, 0),))
    await _granted(counters, bucket_request(day, hold=hold, lease_ms=1_000, id="late"))
    await counters.keep("org_a", "late")
    clock.advance(1)
    assert await counters.settle("org_a", "late", [130], 5)
    probe = Take("day", 1_000, 86_400_000, 0, 0)
    assert (await _granted(counters, bucket_request(probe))).buckets[0].remaining == 870


async def test_money_of_a_kept_reservation_outlives_its_lease_until_the_true_cost_is_known(
    counters: Counters, clock: FakeClock, bucket_request: Make
) -> None:
    caps = (Cap("m", 1_000, 0),)
    await _granted(counters, bucket_request(_take(5, keep=1), hold=Hold(600, 600, caps), id="dead"))
    await counters.keep("org_a", "dead")
    clock.advance(31)
    await _denied(counters, bucket_request(hold=Hold(500, 500, caps)))
    assert await counters.holds("org_a", ["m"]) == (HeldMoney("m", 600, 600),)
    assert await counters.settle("org_a", "dead", [], 250)
    assert (await _granted(counters, bucket_request(hold=Hold(750, 900, caps)))).held == 750


async def test_money_of_a_reservation_that_nothing_recorded_returns_with_its_lease(
    counters: Counters, clock: FakeClock, bucket_request: Make
) -> None:
    """Its process was killed before the request's record was durable: nothing will settle it."""
    caps = (Cap("m", 1_000, 0), Cap("n", 2_000, 0))
    await _granted(counters, bucket_request(_take(5, keep=2), hold=Hold(600, 600, caps), id="dead"))
    assert await counters.extend("org_a", "dead", [], 1, 100) == 100
    clock.advance(29)
    expected = (HeldMoney("m", 700, 700), HeldMoney("n", 700, 700))
    assert await counters.holds("org_a", ["m", "n"]) == expected
    clock.advance(2)
    assert await counters.holds("org_a", ["m", "n"]) == (HeldMoney("m", 0, 0), HeldMoney("n", 0, 0))
    assert (await _granted(counters, bucket_request(hold=Hold(1_000, 1_000, caps)))).held == 1_000
    assert not await counters.settle("org_a", "dead", [], 250)


async def test_money_that_nothing_settles_returns_after_a_week(
    counters: Counters, clock: FakeClock, bucket_request: Make
) -> None:
    caps = (Cap("m", 1_000, 0),)
    await _granted(counters, bucket_request(_take(5, keep=2), hold=Hold(600, 600, caps), id="dead"))
    await counters.keep("org_a", "dead")
    clock.advance(30)
    await counters.renew("org_a", ["dead"], 10**9)  # an expired lease is not revived
    assert await counters.holds("org_a", ["m"]) == (HeldMoney("m", 600, 600),)
    clock.advance(KEPT_MS / 1000 - 1)
    assert await counters.holds("org_a", ["m"]) == (HeldMoney("m", 600, 600),)
    clock.advance(1)
    assert await counters.holds("org_a", ["m"]) == (HeldMoney("m", 0, 0),)
    assert not await counters.settle("org_a", "dead", [], 250)
    assert (await _granted(counters, bucket_request(hold=Hold(1_000, 1_000, caps)))).held == 1_000


async def test_keeping_what_is_unknown_or_settled_does_nothing(
    counters: Counters, bucket_request: Make
) -> None:
    await counters.keep("org_a", "never")
    await _granted(counters, bucket_request(hold=Hold(5, 5, (Cap("m", 10, 0),)), id="a"))
    await counters.settle("org_a", "a", [], 5)
    await counters.keep("org_a", "a")
    assert await counters.holds("org_a", ["m", "other"]) == (
        HeldMoney("m", 0, 0),
        HeldMoney("other", 0, 0),
    )


async def test_a_kept_reservation_can_be_extended_and_renewed(
    counters: Counters, clock: FakeClock, bucket_request: Make
) -> None:
    caps = (Cap("m", 1_000, 0),)
    slot = (Slot("s", 1),)
    await _granted(counters, bucket_request(hold=Hold(100, 100, caps), slots=slot, id="a"))
    await counters.keep("org_a", "a")
    assert await counters.extend("org_a", "a", [], 1, 50) == 50
    for _ in range(3):
        clock.advance(20)
        await counters.renew("org_a", ["a"], 30_000)
    assert (await _denied(counters, bucket_request(slots=slot))).keys == ("s",)
    clock.advance(31)
    assert await counters.holds("org_a", ["m"]) == (HeldMoney("m", 150, 150),)
    assert await counters.settle("org_a", "a", [], 120)
    assert await counters.holds("org_a", ["m"]) == (HeldMoney("m", 0, 0),)


async def test_a_hold_takes_what_there_is_down_to_its_need(
    counters: Counters, bucket_request: Make
) -> None:
    tight, wide = Cap("tight", 300, 100), Cap("wide", 10_000, 0)
    grant = await _granted(counters, bucket_request(hold=Hold(50, 500, (tight, wide)), id="a"))
    assert grant.held == 200
    assert await counters.extend("org_a", "a", [], 1, 10) == 0
    await counters.settle("org_a", "a", [], 20)
    await _granted(counters, bucket_request(hold=Hold(80, 80, (tight, wide)), id="b"))
    assert await counters.extend("org_a", "b", [], 200, 500) == 0
    assert await counters.extend("org_a", "b", [], 1, 60) == 60
    assert await counters.extend("org_a", "b", [], 1, 60) == 40
    assert (await _granted(counters, bucket_request(hold=Hold(1, 9_900, (wide,))))).held == 9_800


async def test_a_hold_of_nothing_is_settled_like_any_other(
    counters: Counters, bucket_request: Make
) -> None:
    caps = (Cap("m", 100, 100),)
    assert (await _granted(counters, bucket_request(hold=Hold(0, 50, caps), id="free"))).held == 0
    assert await counters.settle("org_a", "free", [], 0)
    assert not await counters.settle("org_a", "free", [], 0)
    assert (await _denied(counters, bucket_request(hold=Hold(1, 1, caps)))).affordable == 0


async def test_billing_raises_what_is_spent_and_never_lowers_it(
    counters: Counters, bucket_request: Make
) -> None:
    await _granted(counters, bucket_request(hold=Hold(10, 10, (Cap("m", 100, 50),)), id="a"))
    await counters.settle("org_a", "a", [], 10)
    assert (
        await _denied(counters, bucket_request(hold=Hold(41, 41, (Cap("m", 100, 0),))))
    ).affordable == 40
    assert (
        await _denied(counters, bucket_request(hold=Hold(11, 11, (Cap("m", 100, 90),))))
    ).affordable == 10


async def test_extending_raises_the_takes_into_debt(
    counters: Counters, bucket_request: Make
) -> None:
    await _granted(counters, bucket_request(_take(5), id="a"))
    assert await counters.extend("org_a", "a", [25], 0, 0) == 0
    assert (await _denied(counters, bucket_request(_take(1)))).wait_ms == 96_000
    await counters.settle("org_a", "a", [5], 0)
    assert (await _granted(counters, bucket_request(_take(5)))).buckets[0].remaining == 0


async def test_groups_share_nothing(counters: Counters, bucket_request: Make) -> None:
    await _granted(counters, bucket_request(_take(10), slots=(Slot("s", 1),), group="org_a"))
    await _granted(counters, bucket_request(_take(10), slots=(Slot("s", 1),), group="org_b"))


async def test_shadow_counts_and_refuses_nothing(counters: Counters, bucket_request: Make) -> None:
    over = Take("k", 1, MINUTE, 1, 1, shadow=True)
    slot = Slot("s", 1, shadow=True)
    assert (await _granted(counters, bucket_request(over, slots=(slot,)))).shadow == ()
    grant = await _granted(counters, bucket_request(over, slots=(slot,)))
    assert (grant.shadow, grant.slots_used) == (("k", "s"), (2,))
    denial = await _denied(counters, bucket_request(over, Take("full", 1, MINUTE, 2, 2)))
    assert (denial.keys, denial.shadow) == (("full",), ("k",))


async def test_without_a_lease_nothing_is_left_to_settle(
    counters: Counters, bucket_request: Make
) -> None:
    await _granted(counters, bucket_request(_take(3), lease_ms=0, id="a"))
    assert not await counters.settle("org_a", "a", [0], 0)
    assert (await _granted(counters, bucket_request(_take(7)))).buckets[0].remaining == 0


async def test_concurrent_tasks_admit_exactly_the_limit(
    counters: Counters, bucket_request: Make
) -> None:
    requests = [bucket_request(_take(1, 37), slots=(Slot("s", 50),)) for _ in range(400)]
    answers = await asyncio.gather(*(counters.reserve(each) for each in requests))
    assert sum(isinstance(answer, BucketGrant) for answer in answers) == 37


def test_figures_that_doubles_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="out of range"):
        Take("k", 2**60, MINUTE, 1, 1)
    with pytest.raises(ValueError, match="out of range"):
        Take("k", 10, 86_400_001, 1, 1)
    with pytest.raises(ValueError, match="keep"):
        Take("k", 10, MINUTE, 1, 2)
    with pytest.raises(ValueError, match="need a lease"):
        BucketRequest("g", "id", 0, slots=(Slot("s", 1),))


async def test_a_settlement_above_the_hold_draws_the_rest_and_the_budget_is_reached(
    counters: Counters, bucket_request: Make
) -> None:
    hold = Hold(need=10, want=40, caps=(Cap("budget", 100, 0),))
    assert (await _granted(counters, bucket_request(hold=hold, id="a"))).held == 40
    assert await counters.settle("org_a", "a", [], 130)
    denied = await counters.reserve(bucket_request(hold=hold))
    assert isinstance(denied, Denial) and denied.money == ("budget",) and denied.affordable == 0


def _money(need: int, *caps: Cap, seeds: bool = False) -> Hold:
    return Hold(need, need, caps, seeds)


async def test_an_account_that_is_not_known_grants_nothing_before_it_is_seeded(
    counters: Counters, bucket_request: Make
) -> None:
    cap = Cap("c", 100, 60)
    denial = await _denied(counters, bucket_request(_take(1), hold=_money(30, cap)))
    assert denial.unseeded and not denial.money and not denial.keys
    await counters.seed("org_a", [cap])
    await counters.seed("org_a", [Cap("c", 100, 99)])  # it is seeded once
    await _granted(counters, bucket_request(_take(1), hold=_money(30, cap)))
    assert (await _denied(counters, bucket_request(hold=_money(30, cap)))).money == ("c",)
    assert (await _granted(counters, bucket_request(_take(8)))).buckets[0].remaining == 1


async def test_a_restored_reservation_keeps_its_money_and_its_slot(
    counters: Counters, bucket_request: Make, clock: FakeClock
) -> None:
    """As a gateway does for its running requests when the server has lost its data."""
    cap, slot = Cap("c", 100, 10), Slot("s", 1)
    lost = bucket_request(_take(5), slots=(slot,), hold=_money(40, cap), id="lost")
    assert await counters.extend("org_a", "lost", [5], 1, 10) == -1
    assert await counters.restore(lost, 40) is True
    assert await counters.restore(lost, 40) is False
    assert await counters.extend("org_a", "lost", [], 1, 10) == -1  # its spend is unknown
    await counters.seed("org_a", [cap])
    assert (await _denied(counters, bucket_request(slots=(slot,)))).keys == ("s",)
    assert (await _denied(counters, bucket_request(hold=_money(51, cap)))).money == ("c",)
    assert await counters.extend("org_a", "lost", [], 1, 10) == 10
    assert await counters.settle("org_a", "lost", [5], 45) is True
    assert (await _denied(counters, bucket_request(hold=_money(46, cap)))).money == ("c",)
    await _granted(counters, bucket_request(_take(5), slots=(slot,), hold=_money(45, cap)))
    began, now = await counters.born()
    clock.advance(2)
    assert await counters.born() == (began, now + 2000)


async def test_what_is_settled_before_the_seeding_counts_beside_it(
    counters: Counters, bucket_request: Make
) -> None:
    cap = Cap("c", 100, 50)
    await counters.restore(bucket_request(hold=_money(30, cap), id="lost"), 30)
    assert await counters.settle("org_a", "lost", [], 20)
    await counters.seed("org_a", [cap])
    assert (await _denied(counters, bucket_request(hold=_money(31, cap)))).affordable == 30
