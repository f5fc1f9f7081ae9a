"""Waiting instead of refusing: in turn, bounded, fair between keys, and never past the limit."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from core.clock import SystemClock
from core.counters_memory import MemoryCounters
from core.errors import RateLimited, Unavailable
from core.fair_queue import FairQueue
from core.tenants.plans import LimitRule, Plan, Scope, Unit
from gateway.admission.limiter import Limiter
from gateway.admission.request import AdmissionRequest, SettledUsage
from gateway.admission.reservation import Reservation
from gateway.request.exchange import ClientDisconnected

ONE_AT_A_TIME = (LimitRule(Scope.TENANT, Unit.CONCURRENT, 1),)
QUEUED = Plan("queued", ONE_AT_A_TIME, 2, 1, queue_wait_s=60.0, queue_length=50)
ASK = AdmissionRequest("req_0", "org_a", "proj_a", "key_a", "demo", QUEUED, prompt_tokens=10)


@pytest.fixture
def limiter() -> Limiter:
    clock = SystemClock()
    return Limiter(MemoryCounters(clock), clock)


def _limit_request(name: str, **fields: object) -> AdmissionRequest:
    return structs.replace(ASK, request_id=name, **fields)  # type: ignore[arg-type]


async def _run(
    limiter: Limiter, request: AdmissionRequest, order: list[str], hold_s: float = 0.01
) -> None:
    held = await limiter.reserve(request)
    order.append(request.request_id)
    await asyncio.sleep(hold_s)
    await limiter.settle(held, SettledUsage(10, 0, 5))


async def test_everyone_gets_in_and_keys_take_turns(limiter: Limiter) -> None:
    order: list[str] = []
    first = asyncio.create_task(_run(limiter, _limit_request("first"), order))
    await asyncio.sleep(0)
    greedy = [_run(limiter, _limit_request(f"a{n}"), order) for n in range(8)]
    modest = [_run(limiter, _limit_request(f"b{n}", key_id="key_b"), order) for n in range(2)]
    await asyncio.gather(first, *greedy, *modest)
    assert len(order) == 11 and order[0] == "first"
    assert {name for name in order[1:6] if name.startswith("b")} == {"b0", "b1"}
    assert [name for name in order if name.startswith("a")] == [f"a{n}" for n in range(8)]


async def test_a_newcomer_does_not_barge_in_front_of_the_queue(limiter: Limiter) -> None:
    order: list[str] = []
    held = await limiter.reserve(_limit_request("holder"))
    waiting = asyncio.create_task(_run(limiter, _limit_request("waiting"), order))
    await asyncio.sleep(0.01)
    settled = asyncio.create_task(limiter.settle(held, SettledUsage(10, 0, 1)))
    late = asyncio.create_task(_run(limiter, _limit_request("late"), order))
    await asyncio.gather(settled, waiting, late)
    assert order == ["waiting", "late"]


async def test_a_wait_ends_at_the_plans_bound_and_at_the_deadline(limiter: Limiter) -> None:
    held = await limiter.reserve(_limit_request("holder"))
    loop = asyncio.get_running_loop()
    short = replace(QUEUED, queue_wait_s=0.15)
    for request in (
        _limit_request("bound", plan=short),
        _limit_request("deadline", deadline_s=0.15),
    ):
        began = loop.time()
        with pytest.raises(RateLimited) as refused:
            await limiter.reserve(request)
        assert 0.14 < loop.time() - began < 30.0
        assert refused.value.retry_after_s
    await limiter.release(held)


async def test_a_full_queue_refuses_at_once(limiter: Limiter) -> None:
    tiny = replace(QUEUED, queue_length=2)
    held = await limiter.reserve(_limit_request("holder", plan=tiny))
    waiting = [
        asyncio.create_task(limiter.reserve(_limit_request(f"w{n}", plan=tiny))) for n in range(2)
    ]
    await asyncio.sleep(0.01)
    with pytest.raises(RateLimited) as refused:
        await limiter.reserve(_limit_request("one too many", plan=tiny))
    assert refused.value.code == "queue_full"
    await limiter.release(held)
    for task in waiting:
        await limiter.release(await task)


async def test_a_plan_whose_queue_holds_nobody_refuses_only_while_it_is_over_its_limit(
    limiter: Limiter,
) -> None:
    plan = replace(QUEUED, queue_length=0)
    held = await limiter.reserve(_limit_request("holder", plan=plan))
    with pytest.raises(RateLimited) as refused:
        await limiter.reserve(_limit_request("over", plan=plan))
    assert refused.value.code == "queue_full"
    await limiter.release(held)
    await limiter.release(await limiter.reserve(_limit_request("after", plan=plan)))


async def test_a_fault_in_one_attempt_ends_that_request_alone(
    limiter: Limiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await limiter.reserve(_limit_request("holder"))
    plain = limiter._counters.reserve

    async def _reserve(counters, planned, request, estimate):  # type: ignore[no-untyped-def]
        if request.request_id == "broken":
            raise RuntimeError("a fault")
        return await plain(counters, planned, request, estimate)

    waiting = [
        asyncio.create_task(limiter.reserve(_limit_request(name, key_id=name)))
        for name in ("broken", "next")
    ]
    await asyncio.sleep(0)
    monkeypatch.setattr(limiter._counters, "reserve", _reserve)
    await limiter.release(held)
    with pytest.raises(RuntimeError, match="a fault"):
        await asyncio.wait_for(waiting[0], 30)
    await limiter.release(await asyncio.wait_for(waiting[1], 30))


async def test_who_leaves_the_queue_takes_nothing_with_him(limiter: Limiter) -> None:
    for moment in (0.0, 0.005, 0.02):
        held = await limiter.reserve(_limit_request(f"holder{moment}"))
        gone = asyncio.create_task(limiter.reserve(_limit_request(f"gone{moment}")))
        await asyncio.sleep(moment)
        ended = asyncio.create_task(limiter.settle(held, SettledUsage(10, 0, 1)))
        gone.cancel()
        await asyncio.gather(gone, ended, return_exceptions=True)
        after = await asyncio.wait_for(limiter.reserve(_limit_request(f"after{moment}")), 60)
        assert gone.done() and after.request.request_id == f"after{moment}"
        await limiter.release(after)


@pytest.mark.parametrize("max_in_flight", [0, 1])
async def test_a_client_that_disconnects_ends_its_wait(max_in_flight: int) -> None:
    """In the plan's queue, and in the queue for the gateway's capacity."""
    clock = SystemClock()
    limiter = Limiter(MemoryCounters(clock), clock, max_in_flight=max_in_flight)
    held = await limiter.reserve(_limit_request("holder"))
    callbacks: list[Callable[[], None]] = []
    gone = _limit_request("gone", on_disconnect=callbacks.append)
    waiting = asyncio.create_task(limiter.reserve(gone))
    await asyncio.sleep(0.01)
    callbacks[-1]()
    with pytest.raises(ClientDisconnected):
        await asyncio.wait_for(waiting, 30)
    await limiter.release(held)
    after = await asyncio.wait_for(limiter.reserve(_limit_request("after")), 30)
    await limiter.release(after)


async def test_a_bucket_that_refills_lets_the_queue_in() -> None:
    clock = SystemClock()
    limiter = Limiter(MemoryCounters(clock), clock)
    rules = (LimitRule(Scope.TENANT, Unit.REQUESTS, 1_200),)  # one in 50 ms
    plan = replace(QUEUED, rules=rules)
    held = [await limiter.reserve(_limit_request(f"r{n}", plan=plan)) for n in range(1_200)]
    began = asyncio.get_running_loop().time()
    held.append(await limiter.reserve(_limit_request("waited", plan=plan)))
    assert asyncio.get_running_loop().time() - began < 30.0
    for each in held:
        await limiter.release(each)


async def test_under_saturation_free_plans_are_refused_before_premium_ones_wait() -> None:
    clock = SystemClock()
    limiter = Limiter(MemoryCounters(clock), clock, max_in_flight=10)
    free = Plan("free", (), priority=0, weight=1)
    standard = Plan("standard", (), priority=1, weight=4)
    premium = Plan("premium", (), priority=2, weight=16, queue_wait_s=60, queue_length=10)
    held: list[Reservation] = []

    async def _fill(plan: Plan, name: str) -> int:
        count = 0
        while len(held) < 10:
            try:
                held.append(await limiter.reserve(_limit_request(f"{name}{count}", plan=plan)))
            except Unavailable as refused:
                assert refused.code == "overloaded" and refused.retry_after_s
                break
            count += 1
        return count

    assert [await _fill(free, "f"), await _fill(standard, "s"), await _fill(premium, "p")] == [
        8,
        1,
        1,
    ]
    waiting = asyncio.create_task(limiter.reserve(_limit_request("waits", plan=premium)))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await limiter.release(held.pop())
    held.append(await asyncio.wait_for(waiting, 60))
    for each in held:
        await limiter.release(each)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 500)), min_size=1, max_size=60),
    st.fixed_dictionaries({flow: st.integers(1, 8) for flow in "abc"}),
)
def test_backlogged_flows_share_by_weight_within_one_request(
    pushes: list[tuple[str, int]], weights: dict[str, int]
) -> None:
    queue: FairQueue[int] = FairQueue()
    for flow, cost in pushes:
        queue.push(flow, weights[flow], cost, cost)
    assert len(queue) == len(pushes)
    served = dict.fromkeys("abc", 0.0)
    largest = max(cost / weights[flow] for flow, cost in pushes)
    while len(queue):
        heads = queue.heads()
        backlogged = [ticket.flow for ticket in heads]
        shares = [served[flow] for flow in backlogged]
        assert max(shares) - min(shares) <= 2 * largest + 1e-6
        head = heads[0]
        queue.serve(head)
        served[head.flow] += head.item / weights[head.flow]


def test_idling_earns_no_credit() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(20):
        queue.push("busy", 1, 100, f"busy{number}")
    for _ in range(10):
        queue.serve(queue.heads()[0])
    for number in range(10):
        queue.push("idle", 1, 100, f"idle{number}")
    order = []
    while len(queue):
        head = queue.heads()[0]
        order.append(head.flow)
        queue.serve(head)
    assert 4 <= order[:10].count("busy") <= 6
