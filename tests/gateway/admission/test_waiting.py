"""The queues step by step: who waits, who is refused with which words, and what is given back."""

import asyncio
from collections.abc import Callable
from dataclasses import replace as replaced
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from core import metrics
from core.clock import FakeClock, SystemClock
from core.counters import BucketState, Denial
from core.counters_memory import MemoryCounters
from core.errors import DependencyDown, InsufficientQuota, RateLimited, Unavailable
from core.tenants.plans import BATCH_PRIORITY, LimitRule, Plan, Scope, Unit
from gateway.admission import limiter as limiter_module
from gateway.admission.limiter import Limiter
from gateway.admission.queue import ConcurrencyLimiter, TenantQueues
from gateway.admission.request import AdmissionRequest, MoneyLimit, SettledUsage

PLAN = Plan("test", (), 2, 1, queue_wait_s=30.0, queue_length=2)
REQUEST = AdmissionRequest("req_1", "org_a", "proj_a", "key_a", "demo", PLAN, prompt_tokens=5)
BUCKET = BucketState("key:requests:60:key_a", 5, 60_000, 0, 60_000, 12_000)
DENIED = Denial((BUCKET,), (), (BUCKET.key,))


def with_plan(**changes: object) -> AdmissionRequest:
    return replace(REQUEST, plan=replaced(PLAN, **changes))  # type: ignore[type-var]


@pytest.mark.parametrize(("priority", "admitted"), [(BATCH_PRIORITY, 5), (0, 8), (1, 9), (2, 10)])
async def test_each_priority_may_use_its_share_of_the_capacity(
    priority: int, admitted: int
) -> None:
    capacity = ConcurrencyLimiter(FakeClock(), 10)
    request = with_plan(priority=priority, queue_wait_s=0.0)
    for _ in range(admitted):
        await capacity.acquire(request)
    with pytest.raises(Unavailable) as refused:
        await capacity.acquire(request)
    assert (refused.value.code, refused.value.retry_after_s) == ("overloaded", 1.0)
    capacity.release()
    await capacity.acquire(request)


async def test_the_wait_that_is_told_follows_the_pace_of_endings() -> None:
    clock = FakeClock()
    capacity = ConcurrencyLimiter(clock, 10)
    assert capacity.expected_wait_s() == 1.0
    clock.advance(3.0)
    capacity.release()
    assert capacity.expected_wait_s() == pytest.approx(1.2)
    for _ in range(100):
        capacity.release()
    assert capacity.expected_wait_s() == 0.1
    for _ in range(100):
        clock.advance(1_000.0)
        capacity.release()
    assert capacity.expected_wait_s() == 30.0


async def test_the_queue_for_capacity_is_bounded_and_shares_by_weight() -> None:
    capacity = ConcurrencyLimiter(FakeClock(), 1)
    await capacity.acquire(REQUEST)
    order: list[str] = []

    async def _wait(name: str, weight: int) -> None:
        plan = replaced(PLAN, weight=weight, queue_length=4)
        await capacity.acquire(replace(REQUEST, tenant_id=name, prompt_tokens=9, plan=plan))
        order.append(name)

    waiting = [asyncio.create_task(_wait(name, weight)) for name, weight in
               (("light", 1), ("heavy", 10), ("light", 1), ("heavy", 10))]  # fmt: skip
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await capacity.acquire(with_plan(queue_length=4))
    for number in range(4):
        capacity.release()
        async with asyncio.timeout(30):
            while len(order) <= number:
                await asyncio.sleep(0)
    assert order == ["light", "heavy", "heavy", "light"]
    await asyncio.gather(*waiting)
    assert capacity._active == 1


async def test_a_wait_for_capacity_ends_at_the_bound_and_leaves_the_queue() -> None:
    capacity = ConcurrencyLimiter(FakeClock(), 1)
    await capacity.acquire(REQUEST)
    with pytest.raises(Unavailable):
        await capacity.acquire(with_plan(queue_wait_s=0.01))
    assert len(capacity._queue) == 0
    capacity.release()
    assert capacity._active == 0


async def test_who_is_cancelled_as_his_turn_comes_gives_it_back() -> None:
    capacity = ConcurrencyLimiter(FakeClock(), 1)
    await capacity.acquire(REQUEST)
    waiting = asyncio.create_task(capacity.acquire(REQUEST))
    await asyncio.sleep(0)
    capacity.release()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (capacity._active, len(capacity._queue)) == (0, 0)


async def test_a_fault_while_reserving_gives_the_capacity_back() -> None:
    clock = FakeClock()
    rules = (LimitRule(Scope.KEY, Unit.REQUESTS, 1),)
    limiter = Limiter(MemoryCounters(clock), clock, max_in_flight=2)
    asked = with_plan(rules=rules, queue_wait_s=0.0)
    await limiter.reserve(asked)
    with pytest.raises(RateLimited):
        await limiter.reserve(replace(asked, request_id="req_2"))
    assert limiter._concurrency._active == 1


class Turns:
    """Attempts of a tenant's queue: `answers` in order, then the last one for ever."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.settled: list[tuple[object, ...]] = []

    async def settle(self, *given: object) -> None:
        self.settled.append(given)

    def reservation(self) -> SimpleNamespace:
        bucket_request = SimpleNamespace(group="org_a", id="req_1", takes=(1, 2))
        planned = SimpleNamespace(bucket_request=bucket_request)
        return SimpleNamespace(planned=planned, counters=self)

    async def __call__(self, request: AdmissionRequest) -> object:
        self.asked.append(request.request_id)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer


def waits(reason: str) -> float:
    return float(metrics.limit_queue_seconds.labels(reason)._sum.get())


async def test_a_queued_request_is_told_what_held_it_back() -> None:
    queues, waiting = TenantQueues(FakeClock()), metrics.limit_queue._value.get()
    with pytest.raises(RateLimited) as refused:
        await queues.wait(with_plan(queue_wait_s=0.02), Turns(DENIED))  # type: ignore[arg-type]
    error = refused.value
    assert error.message == "This key may send 5 requests a minute."
    assert (error.reason, error.retry_after_s) == ("queue_timeout", 12.0)  # type: ignore[attr-defined]
    assert metrics.limit_queue._value.get() == waiting


async def test_a_request_whose_turn_never_came_is_told_how_long_it_waited() -> None:
    async def _never(_: AdmissionRequest) -> Denial:
        await asyncio.Event().wait()
        return DENIED

    with pytest.raises(RateLimited) as refused:
        await TenantQueues(FakeClock()).wait(with_plan(queue_wait_s=0.02), _never)
    assert (refused.value.code, refused.value.retry_after_s) == ("queue_timeout", 1.0)
    assert "waited 0.02 s" in refused.value.message


async def test_a_full_queue_says_its_length_and_the_plans_wait() -> None:
    queues, turns = TenantQueues(FakeClock()), Turns(DENIED)
    waiting = [
        asyncio.create_task(queues.wait(replace(REQUEST, request_id=name), turns))  # type: ignore[arg-type]
        for name in ("req_1", "req_2")
    ]
    await asyncio.sleep(0)
    for plan, wait_s in ((PLAN, 30.0), (replaced(PLAN, queue_wait_s=0.0), 1.0)):
        with pytest.raises(RateLimited, match="queue of 2 waiting") as refused:
            await queues.wait(replace(REQUEST, plan=plan), turns)  # type: ignore[arg-type]
        assert (refused.value.code, refused.value.retry_after_s) == ("queue_full", wait_s)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.wait_for(_emptied(queues), 30)


async def _emptied(queues: TenantQueues) -> None:
    while queues.has_waiting("org_a"):
        queues.wake("org_a")
        await asyncio.sleep(0)


async def test_a_queue_is_forgotten_once_nobody_waits() -> None:
    queues = TenantQueues(FakeClock())
    turns = Turns(DENIED, lambda: turns.reservation())
    task = asyncio.create_task(queues.wait(REQUEST, turns))  # type: ignore[arg-type]
    while not turns.asked:
        await asyncio.sleep(0)
    assert queues.has_waiting("org_a") and not queues.has_waiting("org_b")
    queues.wake("org_a")
    queues.wake("org_b")
    held = await asyncio.wait_for(task, 30)
    assert held.counters is turns and turns.settled == []  # type: ignore[comparison-overlap]
    await asyncio.wait_for(_emptied(queues), 30)
    assert turns.asked == ["req_1", "req_1"]


async def test_an_error_of_an_attempt_reaches_its_request_and_frees_its_place() -> None:
    queues = TenantQueues(FakeClock())
    with pytest.raises(DependencyDown):
        await queues.wait(REQUEST, Turns(DependencyDown("away")))  # type: ignore[arg-type]
    await asyncio.wait_for(_emptied(queues), 30)


async def test_what_is_taken_after_the_wait_has_ended_is_given_back() -> None:
    queues, go, turns = TenantQueues(FakeClock()), asyncio.Event(), Turns(None)

    async def _late(_: AdmissionRequest) -> object:
        await go.wait()
        return turns.reservation()

    with pytest.raises(RateLimited):
        await queues.wait(with_plan(queue_wait_s=0.01), _late)  # type: ignore[arg-type]
    assert len(queues._queues["org_a"].queue) == 0
    go.set()
    await asyncio.wait_for(_emptied(queues), 30)
    assert turns.settled == [("org_a", "req_1", [0, 0], 0)]


async def test_what_was_taken_for_a_client_that_left_meanwhile_is_given_back() -> None:
    queues, callbacks = TenantQueues(FakeClock()), list[Callable[[], None]]()
    turns = Turns(lambda: (callbacks[0](), turns.reservation())[1])
    gone = replace(REQUEST, on_disconnect=callbacks.append)
    with pytest.raises(Exception):  # noqa: B017 - ClientDisconnected, whose base is its own
        await queues.wait(gone, turns)  # type: ignore[arg-type]
    await asyncio.wait_for(_emptied(queues), 30)
    assert turns.settled == [("org_a", "req_1", [0, 0], 0)]


@pytest.mark.parametrize(("wait_s", "fits"), [(11.999, False), (12.0, True)])
def test_a_known_wait_must_fit_the_plans_bound(wait_s: float, fits: bool) -> None:
    limiter = Limiter(MemoryCounters(FakeClock()), FakeClock())
    request = with_plan(queue_wait_s=wait_s)
    assert limiter._may_wait(request, DENIED) is fits
    never = replace(BUCKET, wait_ms=None)
    assert not limiter._may_wait(request, Denial((never,), (), (never.key,)))
    slot = replace(BUCKET, wait_ms=0)
    assert limiter._may_wait(request, Denial((slot,), (), ("key:concurrent:key_a",)))


def test_each_denial_has_its_error() -> None:
    limiter = Limiter(MemoryCounters(FakeClock()), FakeClock())
    never = replace(BUCKET, wait_ms=None)
    free = replace(BUCKET, key="tenant:requests:60:org_a", wait_ms=None)
    cases = [
        (replace(DENIED, unseeded=True), DependencyDown, "service_unavailable"),
        (replace(DENIED, money=("budget",)), InsufficientQuota, "insufficient_quota"),
        (replace(DENIED, buckets=(never,)), RateLimited, "request_too_large_for_limit"),
        (replace(DENIED, buckets=(BUCKET, free)), RateLimited, "rate_limit_exceeded"),
    ]
    found = [limiter._rejection(REQUEST, denial) for denial, _, _ in cases]
    assert [type(error) for error in found] != [] and all(
        isinstance(error, kind) for error, (_, kind, _) in zip(found, cases, strict=True)
    )
    assert [error.code for error in found][2:] == [code for _, _, code in cases][2:]
    assert found[0].retry_after_s == 1.0


class Extending(MemoryCounters):
    """Answers of `extend`, in order; the last one for ever."""

    def __init__(self, *answers: int | Exception) -> None:
        super().__init__(FakeClock())
        self.answers = list(answers)
        self.asked = 0

    async def extend(self, group, id, amounts, need, want):  # type: ignore[no-untyped-def]
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Seeds:
    recovered = 0

    async def recover(self, _reservation: object) -> None:
        self.recovered += 1


PAID = replace(
    REQUEST,
    money=(MoneyLimit("budget", 10**12, 0),),
    base_cost_units=5_000,
    output_cost_units=2_000,
    max_output_tokens=10,
)


@pytest.mark.parametrize(
    ("answers", "seeded", "granted", "asked", "recovered"),
    [
        ((8,), True, 4, 1, 0),
        ((0,), True, 0, 1, 0),
        ((-1, 8), True, 4, 2, 1),
        ((-1, 8), False, 0, 1, 0),
        ((Unavailable("away"), 8), True, 4, 2, 0),
        ((Unavailable("away"),), True, None, 10, 0),
    ],
)
async def test_money_is_asked_for_until_the_counters_answer(
    monkeypatch: pytest.MonkeyPatch,
    answers: tuple[int | Exception, ...],
    seeded: bool,
    granted: int | None,
    asked: int,
    recovered: int,
) -> None:
    monkeypatch.setattr(limiter_module, "_EXTEND_PAUSE_S", 0.0)
    counters = Extending(*answers)
    limiter = Limiter(counters, FakeClock())
    held = await limiter.reserve(PAID)
    seeds = Seeds()
    limiter.seeding = seeds if seeded else None  # type: ignore[assignment]
    if granted is None:
        with pytest.raises(DependencyDown):
            await limiter.extend(held, 4)
    else:
        assert await limiter.extend(held, 4) == granted
    assert (counters.asked, seeds.recovered) == (asked, recovered)


async def test_an_extension_charges_the_prompt_as_uncached_and_all_output() -> None:
    rules = (
        LimitRule(Scope.KEY, Unit.INPUT_TOKENS, 100),
        LimitRule(Scope.KEY, Unit.OUTPUT_TOKENS, 100),
    )
    clock = FakeClock()
    limiter = Limiter(MemoryCounters(clock), clock)
    plan = replaced(PLAN, rules=rules, cached_permille=0)
    held = await limiter.reserve(replace(PAID, plan=plan))
    assert await limiter.extend(held, 30) == 30
    after = await limiter.reserve(replace(PAID, request_id="req_2", plan=plan, max_output_tokens=1))
    assert [state.remaining for state in after.buckets] == [100 - 5 - 5, 100 - 40 - 1]


class Waited:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []

    def waited(self, tenant_id: str, reason: str, ms: int) -> None:
        self.calls.append((tenant_id, reason, ms))


@pytest.mark.parametrize(("seconds", "recorded"), [(0.019, []), (0.02, [("org_a", "queue", 20)])])
async def test_waits_longer_than_a_round_trip_are_recorded(
    seconds: float, recorded: list[tuple[str, str, int]]
) -> None:
    clock, waited = FakeClock(), Waited()

    class _Slow(MemoryCounters):
        async def reserve(self, bucket_request):  # type: ignore[no-untyped-def]
            clock.advance(seconds)
            return await super().reserve(bucket_request)

    limiter = Limiter(_Slow(clock), clock, rejections=waited)  # type: ignore[arg-type]
    held = await limiter.reserve(REQUEST)
    assert (held.queued_ms, waited.calls) == (round(seconds * 1000), recorded)


async def test_shadow_limits_are_counted_by_name() -> None:
    clock = FakeClock()
    rule = LimitRule(Scope.KEY, Unit.REQUESTS, 1, shadow=True)
    limiter = Limiter(MemoryCounters(clock), clock)
    counted = metrics.limit_shadow.labels(rule.name)
    before = counted._value.get()
    for number in range(3):
        asked = replace(with_plan(rules=(rule,)), request_id=f"req_{number}")
        await limiter.reserve(asked)
    assert counted._value.get() - before == 2


async def test_the_limiters_task_is_that_of_its_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter, ran = Limiter(MemoryCounters(SystemClock()), SystemClock()), list[str]()

    async def _run() -> None:
        ran.append("run")

    async def _flush() -> int:
        ran.append("flush")
        return 0

    monkeypatch.setattr(limiter._leases, "run", _run)
    monkeypatch.setattr(limiter._leases, "flush", _flush)
    await limiter.run()
    await limiter.close()
    assert ran == ["run", "flush"]


async def test_an_answer_without_output_teaches_nothing_and_wakes_the_queue() -> None:
    clock = FakeClock()
    limiter = Limiter(MemoryCounters(clock), clock)
    held = await limiter.reserve(REQUEST)
    woken: list[str] = []
    limiter._queues.wake = woken.append  # type: ignore[method-assign]
    await limiter.settle(held, SettledUsage(5, 0, 0))
    assert woken == ["org_a"]
    assert limiter._estimates.expect("org_a", "demo", 77) == 77
