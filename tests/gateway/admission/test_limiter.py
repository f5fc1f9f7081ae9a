"""The limiter over the counters of one process: what it admits, what it returns, what it says."""

import pytest
from msgspec.structs import replace

from core.clock import FakeClock
from core.counters_memory import MemoryCounters
from core.errors import InsufficientQuota, RateLimited
from core.tenants.plans import HOUR, LimitRule, Plan, Scope, Unit
from gateway.admission.limiter import Limiter
from gateway.admission.request import AdmissionRequest, MoneyLimit, SettledUsage
from gateway.admission.reservation import Reservation

TOKEN = 2_000_000  # picounits: 2 USD a million


def _plan(*rules: LimitRule, cached_permille: int = 1000) -> Plan:
    return Plan("test", rules, 1, 1, cached_permille=cached_permille, expected_output=100)


def _limit_request(number: int, plan: Plan, **fields: object) -> AdmissionRequest:
    base = AdmissionRequest(
        f"req_{number}", "org_a", "proj_a", "key_a", "demo", plan, prompt_tokens=50
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def _taken(held: Reservation) -> list[int]:
    return [take.amount for take in held.planned.bucket_request.takes]


@pytest.fixture
def limiter(clock: FakeClock) -> Limiter:
    return Limiter(MemoryCounters(clock), clock)


async def test_the_limit_is_admitted_exactly_and_waiting_for_retry_after_succeeds(
    limiter: Limiter, clock: FakeClock
) -> None:
    plan = _plan(LimitRule(Scope.KEY, Unit.REQUESTS, 5))
    for number in range(5):
        await limiter.reserve(_limit_request(number, plan))
    with pytest.raises(RateLimited) as refused:
        await limiter.reserve(_limit_request(5, plan))
    assert refused.value.retry_after_s == 12.0
    clock.advance(11.999)
    with pytest.raises(RateLimited):
        await limiter.reserve(_limit_request(6, plan))
    clock.advance(0.001)
    await limiter.reserve(_limit_request(7, plan))


async def test_nothing_is_taken_where_one_scope_refuses(limiter: Limiter) -> None:
    both = _plan(
        LimitRule(Scope.TENANT, Unit.REQUESTS, 100), LimitRule(Scope.KEY, Unit.REQUESTS, 1)
    )
    await limiter.reserve(_limit_request(0, both))
    for number in range(1, 20):
        with pytest.raises(RateLimited):
            await limiter.reserve(_limit_request(number, both))
    other = await limiter.reserve(_limit_request(99, both, key_id="key_b"))
    assert other.buckets[0].remaining == 98


async def test_settling_returns_the_difference_and_weighs_cached_tokens_by_plan(
    limiter: Limiter,
) -> None:
    plan = _plan(LimitRule(Scope.TENANT, Unit.TOTAL_TOKENS, 1000, HOUR), cached_permille=100)
    held = await limiter.reserve(_limit_request(0, plan))
    assert held.buckets[0].remaining == 1000 - 50 - 100
    await limiter.settle(held, SettledUsage(input_tokens=50, cached_tokens=32, output_tokens=7))
    await limiter.settle(held, SettledUsage(input_tokens=50, cached_tokens=32, output_tokens=7))
    after = await limiter.reserve(_limit_request(1, plan, prompt_tokens=0, max_output_tokens=1))
    assert after.buckets[0].remaining == 1000 - (18 + 4 + 7) - 1


async def test_the_estimate_follows_the_tenants_habit(limiter: Limiter) -> None:
    plan = _plan(LimitRule(Scope.TENANT, Unit.OUTPUT_TOKENS, 100_000))
    for number in range(40):
        held = await limiter.reserve(_limit_request(number, plan))
        await limiter.settle(held, SettledUsage(50, 0, 20))
    usual = await limiter.reserve(_limit_request(99, plan))
    assert _taken(usual) == [20]
    capped = await limiter.reserve(_limit_request(100, plan, max_output_tokens=5))
    assert _taken(capped) == [5]


async def test_money_never_passes_its_cap_and_is_extended_while_it_lasts(limiter: Limiter) -> None:
    plan = _plan(LimitRule(Scope.TENANT, Unit.OUTPUT_TOKENS, 10_000_000))
    prompt = 50 * TOKEN
    cap = prompt + 130 * TOKEN
    request = _limit_request(
        0,
        plan,
        money=(MoneyLimit("budget:2026-01", cap, 0),),
        base_cost_units=prompt,
        output_cost_units=TOKEN,
    )
    held = await limiter.reserve(request)
    assert held.covered == 100
    assert await limiter.extend(held, 64) == 30
    assert await limiter.extend(held, 64) == 0
    assert held.covered == 130
    with pytest.raises(InsufficientQuota):
        await limiter.reserve(replace(request, request_id="req_1"))
    await limiter.settle(held, SettledUsage(50, 0, 10, cost_units=prompt + 10 * TOKEN))
    with pytest.raises(InsufficientQuota, match="output tokens to 70"):
        await limiter.reserve(replace(request, request_id="req_2"))
    second = await limiter.reserve(replace(request, request_id="req_2", max_output_tokens=70))
    assert second.covered == 70


async def test_a_released_request_leaves_no_trace(limiter: Limiter) -> None:
    plan = _plan(
        LimitRule(Scope.KEY, Unit.REQUESTS, 1),
        LimitRule(Scope.KEY, Unit.CONCURRENT, 1),
    )
    for number in range(5):
        await limiter.release(await limiter.reserve(_limit_request(number, plan)))
    await limiter.reserve(_limit_request(9, plan))
    with pytest.raises(RateLimited):
        await limiter.reserve(_limit_request(10, plan))


async def test_a_shadow_limit_reports_and_refuses_nothing(limiter: Limiter) -> None:
    plan = _plan(LimitRule(Scope.KEY, Unit.REQUESTS, 1, shadow=True))
    assert (await limiter.reserve(_limit_request(0, plan))).shadow == ()
    assert (await limiter.reserve(_limit_request(1, plan))).shadow == ("key:requests:60:key_a",)
