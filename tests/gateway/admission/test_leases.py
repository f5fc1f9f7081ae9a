"""Leases and request limits over counters that answer, fail and lose their data at given moments."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace as replaced
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from core import metrics
from core.clock import FakeClock
from core.counters import BucketRequest
from core.counters_memory import MemoryCounters
from core.errors import DependencyDown, RateLimited, Unavailable
from core.tenants.plans import LimitRule, Plan, Scope, Unit
from gateway.admission import leases as leases_module
from gateway.admission import request_rate
from gateway.admission.leases import LEASE_MS, RENEW_EVERY_S, FailoverCounters, Leases
from gateway.admission.request import AdmissionRequest, MoneyLimit
from gateway.admission.request_rate import RequestRate
from gateway.admission.reservation import plan_buckets

PLAN = Plan("test", (LimitRule(Scope.KEY, Unit.REQUESTS, 8),), 1, 1)
REQUEST = AdmissionRequest("req_1", "org_a", "proj_a", "key_a", "demo", PLAN, prompt_tokens=5)
MONEY = (MoneyLimit("budget", 10**9, 0),)


class Shared:
    """Records what it is asked; `away` while it does not answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.away = self.down = False
        self.known = True
        self.began = 100

    def _note(self, *asked: object) -> None:
        if self.away:
            raise Unavailable("away")
        self.asked.append(asked)

    async def reserve(self, asked: BucketRequest) -> object:
        self._note("reserve", asked.id)
        return SimpleNamespace()

    async def settle(self, group: str, id: str, amounts: Sequence[int], cost: int) -> bool:
        self._note("settle", group, id, list(amounts), cost)
        return self.known

    async def keep(self, group: str, id: str) -> None:
        self._note("keep", group, id)

    async def renew(self, group: str, ids: Sequence[str], lease_ms: int) -> None:
        self._note("renew", group, sorted(ids), lease_ms)

    async def restore(self, asked: BucketRequest, held: int) -> bool:
        self._note("restore", asked.id, held)
        self.known = True
        return True

    async def born(self) -> tuple[int, int]:
        self._note("born")
        return self.began, 999

    def calls(self) -> list[tuple[object, ...]]:
        """Since the last look, without those for the age of the data."""
        found, self.asked = [each for each in self.asked if each[0] != "born"], []
        return found


def leased(shared: object, name: str = "req_1", *, kept: bool = False) -> SimpleNamespace:
    asked = plan_buckets(replace(REQUEST, request_id=name), 1).bucket_request
    return SimpleNamespace(counters=shared, held_units=2_500, kept=kept, bucket_request=asked)


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
def leases(shared: Shared) -> Leases:
    return Leases(shared)  # type: ignore[arg-type]


def failover(shared: Shared, mode: str, processes: int = 4) -> FailoverCounters:
    return FailoverCounters(shared, FakeClock(), mode=mode, processes=processes)  # type: ignore[arg-type]


async def test_limits_are_shared_while_the_counters_answer(shared: Shared) -> None:
    counters = failover(shared, "local")
    assert counters.choose(needs_money=True) == (shared, 1)
    planned = plan_buckets(REQUEST, 1)
    _, used = await counters.reserve(shared, planned, REQUEST, 1)  # type: ignore[arg-type]
    assert used is shared and metrics.limit_mode._value.get() == 0


@pytest.mark.parametrize("known_down", [True, False])
async def test_without_the_counters_each_process_grants_its_share(
    shared: Shared, known_down: bool
) -> None:
    counters = failover(shared, "local")
    shared.away, shared.down = True, known_down
    if known_down:
        local, shares = counters.choose(needs_money=False)
        assert shares == 4 and local is not shared
    granted = 0
    for number in range(8):
        asked = replace(REQUEST, request_id=f"req_{number}")
        answer, _ = await counters.reserve(shared, plan_buckets(asked, 1), asked, 1)  # type: ignore[arg-type]
        granted += hasattr(answer, "held")
    assert granted == 2
    assert metrics.limit_mode._value.get() == 1
    with pytest.raises(DependencyDown, match="money cannot be checked"):
        paid = replace(REQUEST, money=MONEY)
        await counters.reserve(shared, plan_buckets(paid, 1), paid, 1)  # type: ignore[arg-type]


def test_closed_refuses_and_says_so_in_the_metric(shared: Shared) -> None:
    counters = failover(shared, "closed")
    shared.down = True
    with pytest.raises(DependencyDown, match="limits cannot be checked") as refused:
        counters.choose(needs_money=False)
    assert (refused.value.code, refused.value.retry_after_s) == ("limits_unavailable", 1.0)
    assert metrics.limit_mode._value.get() == 2


def test_a_share_is_never_of_no_process(shared: Shared) -> None:
    counters = failover(shared, "local", 0)
    shared.down = True
    assert counters.choose(needs_money=False)[1] == 1


async def test_settlements_that_failed_are_retried_in_order(shared: Shared, leases: Leases) -> None:
    shared.away = True
    for number in (1, 2):
        await leases.end(shared, "org_a", f"req_{number}", [number], 10 * number)  # type: ignore[arg-type]
    assert await leases.flush() == 2
    shared.away = False
    assert await leases.flush() == 0
    assert shared.calls() == [
        ("settle", "org_a", "req_1", [1], 10),
        ("settle", "org_a", "req_2", [2], 20),
    ]
    assert await leases.flush() == 0 and shared.calls() == []


async def test_no_owed_cost_is_dropped_however_many_more_are_owed_meanwhile(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settlements fail while others are retried, beyond the bound of what is kept without a cost."""
    monkeypatch.setattr(leases_module, "_MAX_UNSETTLED", 4)
    monkeypatch.setattr(leases_module, "_AT_ONCE", 2)
    leases = Leases(shared)  # type: ignore[arg-type]
    shared.away = True
    for number in range(6):
        await leases.end(shared, "org_a", f"paid_{number}", [1], 10)  # type: ignore[arg-type]
        await leases.end(shared, "org_a", f"free_{number}", [1], 0)  # type: ignore[arg-type]
    settle, more = shared.settle, iter(range(6, 9))

    async def _and_owe(group: str, id: str, amounts: Sequence[int], cost: int) -> bool:
        if (number := next(more, None)) is not None:
            shared.away = True
            await leases.end(shared, "org_a", f"paid_{number}", [1], 10)  # type: ignore[arg-type]
            shared.away = False
        return await settle(group, id, amounts, cost)

    shared.away = False
    monkeypatch.setattr(shared, "settle", _and_owe)
    left = 1
    while left:
        left = await leases.flush()
    settled = {str(each[2]) for each in shared.calls()}
    assert settled == {f"paid_{n}" for n in range(9)} | {f"free_{n}" for n in range(2, 6)}


async def test_a_lost_reservation_is_entered_again_before_it_is_settled(
    shared: Shared, leases: Leases
) -> None:
    leases.add(leased(shared))
    assert await leases.restore_lost() == 0
    shared.began, shared.known = 200, False
    await leases.end(shared, "org_a", "req_1", [1], 7)  # type: ignore[arg-type]
    assert shared.calls() == [
        ("settle", "org_a", "req_1", [1], 7),
        ("restore", "req_1", 3),
        ("settle", "org_a", "req_1", [1], 7),
    ]


@pytest.mark.parametrize("why", ["it cost nothing", "it is not ours", "nothing is lost"])
async def test_an_unknown_reservation_is_left_where(
    shared: Shared, leases: Leases, why: str
) -> None:
    if why != "it is not ours":
        leases.add(leased(shared))
    await leases.restore_lost()
    shared.known = False
    if why != "nothing is lost":
        shared.began = 200
    cost = 0 if why == "it cost nothing" else 7
    await leases.end(shared, "org_a", "req_1", [1], cost)  # type: ignore[arg-type]
    assert shared.calls() == [("settle", "org_a", "req_1", [1], cost)]


async def test_lost_data_is_entered_again_once_and_kept_money_stays_kept(
    shared: Shared, leases: Leases
) -> None:
    other = Shared()
    for each in (leased(shared), leased(shared, "req_2", kept=True), leased(other, "req_3")):
        leases.add(each)
    assert [await leases.restore_lost(), await leases.restore_lost()] == [0, 0]
    shared.began = 200
    assert [await leases.restore_lost(), await leases.restore_lost()] == [2, 0]
    assert shared.calls() == [
        ("restore", "req_1", 3),
        ("restore", "req_2", 3),
        ("keep", "org_a", "req_2"),
    ]
    assert other.calls() == []
    shared.away = True
    assert await leases.restore_lost() == 0


async def test_running_requests_are_renewed_by_tenant_and_ended_ones_are_not(
    shared: Shared, leases: Leases
) -> None:
    other = Shared()
    for each in (leased(shared), leased(shared, "req_2"), leased(other, "req_3")):
        leases.add(each)
    leases.add(leased(shared, "req_4"))
    await leases.end(shared, "org_a", "req_4", [0], 0)  # type: ignore[arg-type]
    shared.calls()
    await leases._renew()
    assert shared.calls() == [("renew", "org_a", ["req_1", "req_2"], 30_000)]
    assert other.calls() == [("renew", "org_a", ["req_3"], 30_000)]
    assert (RENEW_EVERY_S, LEASE_MS) == (10.0, 30_000), "three times in a lease"


async def test_what_could_not_be_kept_is_kept_with_the_next_renewal(
    shared: Shared, leases: Leases
) -> None:
    held = leased(shared)
    leases.add(held)
    shared.away = True
    leases.keep(held)
    assert leases._keeper is not None
    await leases._keeper
    assert held.kept and shared.calls() == []
    shared.away = False
    for _ in range(2):
        await leases._renew()
    assert [each for each in shared.calls() if each[0] == "keep"] == [("keep", "org_a", "req_1")]
    leases.keep(held)
    await leases.end(shared, "org_a", "req_1", [0], 0)  # type: ignore[arg-type]
    assert leases._unkept == {}


async def test_what_is_kept_while_the_counters_are_asked_is_kept_soon_too(
    shared: Shared, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (leased(shared, f"req_{number}") for number in range(1, 4))
    told: list[str] = []

    async def _keep(group: str, id: str) -> None:
        told.append(id)
        if id == "req_1":
            leases.keep(second)
            leases.keep(third)
            await leases.end(shared, group, "req_3", [0], 0)  # type: ignore[arg-type]

    monkeypatch.setattr(shared, "keep", _keep)
    leases.keep(first)
    assert leases._keeper is not None
    await leases._keeper
    assert told == ["req_1", "req_2"], "of one that ended, nothing is told"
    assert leases._unkept == {}


def test_counters_in_memory_are_told_at_once(leases: Leases) -> None:
    told: list[tuple[str, str]] = []
    memory = SimpleNamespace(keep_now=lambda group, id: told.append((group, id)))
    leases.keep(leased(memory))
    assert told == [("org_a", "req_1")]


def rate(limit: int, **plan: object) -> tuple[RequestRate, AdmissionRequest]:
    rules = (
        LimitRule(Scope.KEY, Unit.REQUESTS, limit),
        LimitRule(Scope.KEY, Unit.INPUT_TOKENS, 1),
        LimitRule(Scope.KEY, Unit.CONCURRENT, 1),
    )
    clock = FakeClock()
    counters = FailoverCounters(MemoryCounters(clock), clock, mode="closed", processes=1)
    asked = replace(REQUEST, plan=Plan("rate", rules, 1, 1, **plan), prompt_tokens=50)  # type: ignore[arg-type]
    return RequestRate(counters), asked


async def test_only_the_limits_on_requests_are_taken(  # and given back, or kept
) -> None:
    limited, asked = rate(2)
    first = await limited.take(asked, may_wait=False)
    assert first is not None and first.taken.id == "req_1-first"
    await first.give_back()
    for number in range(2):
        await limited.count(replace(asked, request_id=f"req_{number}"))
    with pytest.raises(RateLimited) as refused:
        await limited.count(replace(asked, request_id="req_9"))
    assert refused.value.retry_after_s == 30.0
    assert await limited.take(replace(asked, plan=replaced(PLAN, rules=())), may_wait=False) is None


@pytest.mark.parametrize(("wait_s", "waits"), [(0.0, False), (29.98, False), (30.0, True)])
async def test_a_request_over_the_limit_goes_on_only_where_its_plan_lets_it_wait(
    wait_s: float, waits: bool
) -> None:
    limited, asked = rate(2, queue_wait_s=wait_s, queue_length=5)
    for number in range(2):
        await limited.count(replace(asked, request_id=f"req_{number}"))
    late = replace(asked, request_id="req_9")
    if waits:
        assert await limited.take(late, may_wait=True) is None
    else:
        with pytest.raises(RateLimited):
            await limited.take(late, may_wait=True)
    with pytest.raises(RateLimited):
        await limited.take(late, may_wait=False)


async def test_a_refused_prompt_keeps_its_request_and_a_good_one_returns_it() -> None:
    limited, asked = rate(1)
    async with limited._held(asked):
        with pytest.raises(RateLimited):
            await limited.count(replace(asked, request_id="req_2"))
    with pytest.raises(ValueError, match="refused"):
        async with limited._held(replace(asked, request_id="req_3")):
            raise ValueError("refused")
    with pytest.raises(RateLimited):
        await limited.count(replace(asked, request_id="req_4"))
    waiting = replace(asked, request_id="req_5", plan=replaced(asked.plan, queue_wait_s=99.0))
    async with limited._held(waiting):
        pass  # nothing was taken, and nothing is given back
    with pytest.raises(ValueError, match="refused"):
        async with limited._held(waiting):
            raise ValueError("refused")


async def test_the_limits_on_requests_are_held_while_a_large_prompt_is_prepared() -> None:
    limited, asked = rate(1)
    owner = SimpleNamespace(
        tenant_id="org_a", project_id="proj_a", key_id="key_a", origin_id="key_a", plan=asked.plan
    )
    target = SimpleNamespace(model=SimpleNamespace(name="demo"))
    ctx = SimpleNamespace(large=True, request_id="req_1", principal=owner, target=target)
    async with limited.hold_for_large(ctx)():  # type: ignore[arg-type]
        with pytest.raises(RateLimited):
            await limited.count(replace(asked, request_id="req_2"))
    await limited.count(replace(asked, request_id="req_3"))


def test_a_small_request_is_not_held() -> None:
    limited, _ = rate(1)
    ctx = SimpleNamespace(large=False)
    assert limited.hold_for_large(ctx) is nullcontext  # type: ignore[arg-type]


def test_a_plan_is_reduced_once() -> None:
    plan = rate(1)[1].plan
    reduced = request_rate._requests_only(plan)
    assert [rule.unit for rule in reduced.rules] == [Unit.REQUESTS]
    assert request_rate._requests_only(plan) is reduced
    assert request_rate._requests_only(reduced) is reduced
