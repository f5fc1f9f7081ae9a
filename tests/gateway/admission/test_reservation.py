"""The size of a reservation: takes, slots and holds of a plan, against amounts by hand."""

from dataclasses import replace as replaced
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from core.clock import FakeClock
from core.counters import BucketGrant, Cap, Hold, Slot, Take
from core.counters_memory import MemoryCounters
from core.errors import Unavailable
from core.events import UsageEvent
from core.tenants.plans import LimitRule, Plan, Scope, Unit
from gateway.admission import estimates, reservation
from gateway.admission.estimates import OutputEstimates
from gateway.admission.limiter import Limiter
from gateway.admission.request import UNUSED, AdmissionRequest, MoneyLimit, SettledUsage
from gateway.admission.reservation import (
    NO_LIMIT,
    Reservation,
    bucket_amounts,
    output_tokens_covered,
    plan_buckets,
)
from tests.gateway.metering.spool_rows import closed

UNIT = 1000  # picounits of a nano-unit
RULES = (
    LimitRule(Scope.TENANT, Unit.REQUESTS, 7),
    LimitRule(Scope.PROJECT, Unit.INPUT_TOKENS, 100, 10),
    LimitRule(Scope.KEY, Unit.OUTPUT_TOKENS, 50, 3600, shadow=True),
    LimitRule(Scope.MODEL, Unit.TOTAL_TOKENS, 9_000),
    LimitRule(Scope.TENANT, Unit.CONCURRENT, 4),
    LimitRule(Scope.KEY, Unit.CONCURRENT, 2, shadow=True),
)
PLAN = Plan("test", RULES, 1, 1, cached_permille=300, expected_output=20)
REQUEST = AdmissionRequest("req_1", "org_a", "proj_a", "key_a", "demo", PLAN, prompt_tokens=30)
CAP = MoneyLimit("budget", 1_000 * UNIT, 10 * UNIT)


def take(rule: int, owner: str, amount: int, minimum: int, *, shares: int = 1) -> Take:
    found = RULES[rule]
    limit = found.limit // shares
    key = f"{found.name}:{owner}"
    return Take(key, limit, found.period_s * 1000, amount, minimum, found.shadow)


def test_every_rule_takes_its_units_from_its_owners_bucket() -> None:
    planned = plan_buckets(REQUEST, 20)
    assert planned.bucket_request.takes == (
        take(0, "org_a", 1, 1),
        take(1, "proj_a", 30, 30),
        take(2, "key_a", 20, 0),
        take(3, "demo", 50, 30),
    )
    assert planned.bucket_request.slots == (
        Slot(f"{RULES[4].name}:org_a", 4, False),
        Slot(f"{RULES[5].name}:key_a", 2, True),
    )
    assert planned.rules == RULES[:4] and planned.bucket_request.hold is None
    asked = planned.bucket_request
    assert (asked.group, asked.id, asked.lease_ms) == ("org_a", "req_1", 30_000)


def test_an_estimate_above_a_limit_is_cut_to_it_and_a_prompt_is_not() -> None:
    takes = plan_buckets(REQUEST, 80).bucket_request.takes
    assert (takes[2].amount, takes[2].keep) == (50, 0)
    long = replace(REQUEST, prompt_tokens=101)
    takes = plan_buckets(long, 20).bucket_request.takes
    assert (takes[1].amount, takes[1].keep) == (101, 101)


def test_each_process_gets_an_equal_share_and_at_least_one() -> None:
    planned = plan_buckets(REQUEST, 5, shares=4)
    takes = planned.bucket_request.takes
    assert [each.capacity for each in takes] == [1, 25, 12, 2_250]
    assert [each.limit for each in planned.bucket_request.slots] == [1, 1]
    assert plan_buckets(REQUEST, 5).bucket_request.takes[0].capacity == 7


@pytest.mark.parametrize(("target", "counts"), [(None, 1), ("demo", 1), ("other", 0)])
def test_a_rule_for_one_model_leaves_others_alone(target: str | None, counts: int) -> None:
    rule = LimitRule(Scope.MODEL, Unit.REQUESTS, 5, target=target)
    plan = Plan(f"for {target}", (rule,), 1, 1)
    planned = plan_buckets(replace(REQUEST, plan=plan), 5)
    assert len(planned.bucket_request.takes) == len(planned.rules) == counts


def test_layouts_and_sizes_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "_layouts", {})
    monkeypatch.setattr(reservation, "_sized", {})
    monkeypatch.setattr(reservation, "_MAX_LAYOUTS", 2)
    monkeypatch.setattr(reservation, "_MAX_SIZES", 2)
    first = plan_buckets(REQUEST, 20)
    again = plan_buckets(REQUEST, 20)
    assert again.bucket_request.takes is first.bucket_request.takes
    assert again.rules is first.rules
    plan_buckets(REQUEST, 21)
    assert len(reservation._sized) == 2
    plan_buckets(REQUEST, 22)
    assert len(reservation._sized) == 1
    plan_buckets(replace(REQUEST, key_id="key_b"), 20)
    assert len(reservation._layouts) == 2
    plan_buckets(replace(REQUEST, key_id="key_c"), 20)
    assert len(reservation._layouts) == 1
    changed = replaced(PLAN, rules=(replaced(RULES[0], limit=9), *RULES[1:]))
    takes = plan_buckets(replace(REQUEST, key_id="key_c", plan=changed), 20).bucket_request.takes
    assert takes[0].capacity == 9, "another plan of the same owner"


def test_the_hold_needs_the_whole_estimate_and_one_output_token_at_least() -> None:
    paid = replace(REQUEST, money=(CAP,), base_cost_units=5 * UNIT, output_cost_units=2 * UNIT)
    caps = (Cap("budget", 1_000, 10),)
    assert plan_buckets(paid, 20).bucket_request.hold == Hold(45, 45, caps, True)
    assert plan_buckets(paid, 0, seeds=False).bucket_request.hold == Hold(7, 7, caps, False)
    uneven = replace(
        paid,
        base_cost_units=5 * UNIT + 1,
        money=(MoneyLimit("budget", 1_000 * UNIT + 999, 10 * UNIT + 1),),
    )
    hold = plan_buckets(uneven, 1).bucket_request.hold
    assert hold == Hold(8, 8, (Cap("budget", 1_000, 11),), True), "rounded to the safe side"
    other = replace(paid, money=(replace(CAP, spent_units=20 * UNIT),))
    found = plan_buckets(other, 1).bucket_request.hold
    assert found is not None and found.caps == (Cap("budget", 1_000, 20),)


@pytest.mark.parametrize(("held", "covered"), [(4, 0), (5, 0), (6, 0), (7, 1), (8, 1), (9, 2)])
def test_held_money_covers_whole_tokens(held: int, covered: int) -> None:
    paid = replace(REQUEST, money=(CAP,), base_cost_units=5 * UNIT, output_cost_units=2 * UNIT)
    assert output_tokens_covered(paid, held * UNIT) == covered


def test_without_a_money_limit_or_a_price_of_output_everything_is_covered() -> None:
    assert NO_LIMIT >= 1 << 60
    assert output_tokens_covered(replace(REQUEST, output_cost_units=2), 0) == NO_LIMIT
    assert output_tokens_covered(replace(REQUEST, money=(CAP,)), 0) == NO_LIMIT


def test_cached_tokens_weigh_what_the_plan_says_rounded_up_once() -> None:
    usage = SettledUsage(30, 11, 8)  # 19 whole, 11 * 0.3 = 3.3
    assert bucket_amounts(RULES[:4], PLAN, usage) == [1, 23, 8, 31]
    assert bucket_amounts(RULES[:4], PLAN, UNUSED) == [0, 0, 0, 0]
    free = replaced(PLAN, cached_permille=0)
    assert bucket_amounts(RULES[:4], free, usage) == [1, 19, 8, 27]


def event(**changes: object) -> UsageEvent:
    return replace(closed("req_1"), **changes)


class Settler:
    def __init__(self) -> None:
        self.settled: list[SettledUsage] = []
        self.asked: list[int] = []
        self.error: Exception | None = None

    async def extend(self, held: Reservation, output_tokens: int) -> int:
        self.asked.append(output_tokens)
        held.covered += min(output_tokens, 70)
        return 0

    def keep(self, held: Reservation) -> None:
        held.kept = True

    async def settle(self, held: Reservation, usage: SettledUsage) -> None:
        self.settled.append(usage)
        if self.error is not None:
            raise self.error


def reserved(settler: Settler, covered: int = 10) -> Reservation:
    grant = BucketGrant((), (), 0, (), ("key:requests:60:key_a",))
    counters = MemoryCounters(FakeClock())
    return Reservation(REQUEST, plan_buckets(REQUEST, 1), grant, counters, settler, covered, 0)


async def test_a_settlement_keeps_what_the_event_says_and_never_raises() -> None:
    settler = Settler()
    held = reserved(settler)
    await held.settle(event())
    await held.settle(None)
    settler.error = Unavailable("the counters are away")
    await held.settle(
        event(input_tokens=0, cached_tokens=0, output_tokens=0, waived_tokens=0, quantity=0)
    )
    assert settler.settled == [SettledUsage(10, 4, 5), UNUSED, UNUSED]


async def test_money_is_extended_in_steps_until_it_covers_the_need() -> None:
    settler = Settler()
    held = reserved(settler)
    assert await held.extend(12) is True
    assert await held.extend(200) is False
    assert settler.asked == [64, 200 - 74]
    held.keep()
    assert held.kept


def test_a_reservation_tells_its_price_and_its_limits() -> None:
    held = reserved(Settler())
    assert (held.price_version, held.mode, held.queued_ms) == ("", "shared", 0)
    held.queued_ms, held.mode = 7, "local"
    state = held.limits()
    assert (state.buckets, state.mode, state.queued_ms) == ((), "local", 7)
    assert state.shadow == held.shadow == ("key:requests:60:key_a",)


@pytest.mark.parametrize(
    ("expected", "most", "choices", "output"),
    [(20, None, 1, 20), (20, 5, 1, 5), (20, 50, 1, 20), (20, 5, 3, 15)],
)
def test_the_output_estimate_covers_every_choice(
    expected: int, most: int | None, choices: int, output: int
) -> None:
    asked = replace(REQUEST, max_output_tokens=most, choices=choices)
    assert asked.estimated_output(expected) == output


def test_a_queue_orders_by_tokens_and_waits_no_longer_than_the_deadline() -> None:
    queued = replace(REQUEST, plan=replaced(PLAN, queue_wait_s=8.0))
    assert (queued.queue_cost, replace(queued, max_output_tokens=3).queue_cost) == (50, 33)
    bounds = [replace(queued, deadline_s=each).wait_bound_s for each in (None, 3.0, 9.0)]
    assert bounds == [8.0, 3.0, 8.0]


def test_the_mean_and_its_deviation_follow_the_answers() -> None:
    learned = OutputEstimates()
    assert learned.expect("org_a", "m", 100) == 100
    learned.learn("org_a", "m", 50, 100)
    # Mean 100 - 0.2 * 50 = 90; deviation 25 + 0.2 * (50 - 25) = 30.
    assert learned.expect("org_a", "m", 100) == 150
    learned.learn("org_a", "m", 90, 100)
    # Mean 90; deviation 30 - 0.2 * 30 = 24.
    assert learned.expect("org_a", "m", 100) == 138
    assert learned.expect("org_a", "other", 7) == 7
    for _ in range(100):
        learned.learn("org_b", "m", 0, 4)
    assert learned.expect("org_b", "m", 4) == 1


def test_the_estimates_that_were_updated_least_lately_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(estimates, "_MAX_ENTRIES", 2)
    learned = OutputEstimates()
    for name in ("a", "b", "a", "c"):
        learned.learn(name, "m", 10, 10)
    known = [learned.expect(name, "m", 99) != 99 for name in "abc"]
    assert known == [True, False, True]


async def test_an_extension_is_charged_to_the_buckets_and_learned_per_choice() -> None:
    clock = FakeClock(datetime(2026, 3, 1, tzinfo=UTC))
    limiter = Limiter(MemoryCounters(clock), clock)
    plan = Plan("e", (LimitRule(Scope.KEY, Unit.OUTPUT_TOKENS, 1_000),), 1, 1, expected_output=10)
    paid = replace(
        REQUEST,
        plan=plan,
        choices=2,
        money=(MoneyLimit("budget", 105 * UNIT, 0),),
        base_cost_units=5 * UNIT,
        output_cost_units=2 * UNIT,
    )
    held = await limiter.reserve(paid)
    assert (held.covered, held.held_units) == (20, 45 * UNIT)
    assert await limiter.extend(held, 20) == 20
    assert (held.covered, held.held_units) == (40, 85 * UNIT)
    assert await limiter.extend(held, 20) == 10
    assert await limiter.extend(held, 1) == 0
    assert (held.covered, held.held_units) == (50, 105 * UNIT)
    await limiter.settle(held, SettledUsage(30, 0, 40, cost_units=85 * UNIT))
    after = await limiter.reserve(replace(paid, request_id="req_2", choices=1, money=()))
    # 30, 25 and 20 tokens a choice: of what was needed, twice, and of what was delivered.
    assert after.planned.bucket_request.takes[0].amount == 30
    assert after.buckets[0].remaining == 1_000 - 40 - 30
    assert await limiter.extend(after, 7) == 7, "without a money limit nothing is asked"
