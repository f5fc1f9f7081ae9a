"""What requests generate beyond their reservations is bounded, and several answers count as requests."""

from dataclasses import replace as replaced
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.clock import FakeClock
from core.counters_memory import MemoryCounters
from core.errors import RateLimited, TollhouseError
from core.tenants.plans import KEY_OVERSHOOT_S, STANDARD, LimitRule, Plan, Scope, Unit
from gateway.admission.limiter import Limiter
from gateway.admission.request import AdmissionRequest, SettledUsage
from gateway.admission.reservation import Reservation

LIMIT = 10_000
TOKENS = LimitRule(Scope.TENANT, Unit.TOTAL_TOKENS, LIMIT)
PLAN = Plan("test", (TOKENS,), 1, 1, expected_output=20)
REQUEST = AdmissionRequest("req", "org", "proj", "key", "demo", PLAN, prompt_tokens=10)


def make_limiter(processes: int = 1) -> Limiter:
    clock = FakeClock(datetime(2026, 3, 1, tzinfo=UTC))
    return Limiter(MemoryCounters(clock), clock, processes=processes)


async def admitted(limiter: Limiter, *asked: AdmissionRequest) -> list[Reservation]:
    found = []
    for number, each in enumerate(asked):
        try:
            found.append(
                await limiter.reserve(replace(each, request_id=f"req_{id(asked)}_{number}"))
            )
        except TollhouseError:
            continue
    return found


async def learn_short_answers(limiter: Limiter) -> None:
    for held in await admitted(limiter, *[replace(REQUEST, max_output_tokens=20)] * 30):
        await limiter.settle(held, SettledUsage(0, 0, 4, requests=0))


@pytest.mark.parametrize("processes", [1, 4])
async def test_learned_estimates_let_through_at_most_one_limit_more(processes: int) -> None:
    limiter = make_limiter(processes)
    await learn_short_answers(limiter)
    held = await admitted(limiter, *[replace(REQUEST, max_output_tokens=4096)] * 28)
    assert held, "requests go through"
    assert sum(4096 + 10 for _ in held) <= LIMIT + LIMIT // processes
    for each in held:
        await limiter.settle(each, SettledUsage(10, 0, 4096))
    more = await admitted(limiter, replace(REQUEST, max_output_tokens=1))
    assert bool(more) == (len(held) * 4106 + 11 <= LIMIT), "what was generated counts"


@pytest.mark.parametrize("period_s", [60, 3_600, 86_400])
async def test_other_keys_wait_15_seconds_at_most_for_what_a_key_did_not_reserve(
    period_s: int,
) -> None:
    clock = FakeClock(datetime(2026, 3, 1, tzinfo=UTC))
    limiter = Limiter(MemoryCounters(clock), clock)
    rule = LimitRule(Scope.TENANT, Unit.TOTAL_TOKENS, LIMIT, period_s)
    asked = replace(REQUEST, plan=replaced(PLAN, rules=(rule,)))
    for held in await admitted(limiter, *[replace(asked, max_output_tokens=20)] * 30):
        await limiter.settle(held, SettledUsage(0, 0, 4, requests=0))
    held = await admitted(limiter, *[replace(asked, max_output_tokens=900)] * 40)
    assert held, "requests go through"
    for each in held:
        await limiter.settle(each, SettledUsage(10, 0, 900))
    other = replace(asked, key_id="other", max_output_tokens=1)
    try:
        await limiter.reserve(other)
        waited = 0.0
    except RateLimited as error:
        waited = error.retry_after_s or 0.0
    one_request = 11 * period_s / LIMIT
    assert waited <= KEY_OVERSHOOT_S + one_request


@given(
    sizes=st.lists(st.integers(1, LIMIT - 10), min_size=1, max_size=40),
    choices=st.lists(st.integers(1, 4), min_size=40, max_size=40),
    learned=st.booleans(),
)
async def test_whatever_is_asked_at_once_the_overshoot_is_bounded(
    sizes: list[int], choices: list[int], learned: bool
) -> None:
    limiter = make_limiter()
    if learned:
        await learn_short_answers(limiter)
    asked = [
        replace(REQUEST, max_output_tokens=max(1, size // count), choices=count)
        for size, count in zip(sizes, choices, strict=False)
    ]
    held = await admitted(limiter, *asked)
    total = sum(10 + (e.request.max_output_tokens or 0) * e.request.choices for e in held)
    assert total <= 2 * LIMIT


async def test_what_short_answers_did_not_use_is_open_to_the_next() -> None:
    limiter = make_limiter()
    await learn_short_answers(limiter)
    for _ in range(200):
        held = await admitted(limiter, replace(REQUEST, max_output_tokens=4096))
        assert len(held) == 1
        await limiter.settle(held[0], SettledUsage(10, 0, 5))


@pytest.mark.parametrize(
    ("asked", "through"),
    [
        ([3, 2, 1], [3, 1]),
        ([64, 1], [64]),  # as many as the limit: it runs alone
        ([1, 64, 1, 1, 1, 1], [1, 1, 1, 1]),
        ([4, 1], [4]),
    ],
)
async def test_answers_count_as_requests_for_concurrency(
    asked: list[int], through: list[int]
) -> None:
    rule = LimitRule(Scope.TENANT, Unit.CONCURRENT, 4)
    plan = replaced(PLAN, rules=(rule,))
    limiter = make_limiter()
    wanted = [replace(REQUEST, plan=plan, choices=count) for count in asked]
    held = await admitted(limiter, *wanted)
    assert [each.request.choices for each in held] == through
    for each in held:
        await limiter.release(each)
    assert len(await admitted(limiter, replace(REQUEST, plan=plan, choices=4))) == 1


async def test_candidates_that_are_not_delivered_count_in_the_limits() -> None:
    limiter = make_limiter()
    best = replace(REQUEST, max_output_tokens=200, candidates=20)
    (held,) = await admitted(limiter, best)
    assert held.planned.bucket_request.takes[0].amount == 10 + 20 * 200
    await limiter.settle(held, SettledUsage(10, 0, 200, withheld_tokens=19 * 200))
    (after,) = await admitted(limiter, replace(REQUEST, max_output_tokens=1))
    assert after.buckets[0].remaining == LIMIT - (10 + 20 * 200) - 11


def test_a_request_without_a_bound_reserves_what_is_usual() -> None:
    """The rest of a context, which may be unknown, is no bound that somebody chose."""
    rest = {"max_output_tokens": 16_777_208}
    assert made(**rest, is_bounded=False).worst_output(256) == 256
    assert made(**rest).worst_output(256) == 16_777_208
    assert made(max_output_tokens=9, is_bounded=False).worst_output(256) == 9
    assert made(**rest, is_bounded=False, choices=4).worst_output(256) == 4 * 256


def made(**fields: Any) -> AdmissionRequest:
    known = {"request_id": "r", "tenant_id": "t", "project_id": "p", "key_id": "k", "model": "m"}
    return AdmissionRequest(**known, plan=STANDARD, prompt_tokens=1, **fields)
