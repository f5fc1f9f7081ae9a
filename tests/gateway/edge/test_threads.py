"""Threads by kind: turns and shares of tenants, errors, cancellation and the end of a pool."""

import asyncio
import threading
from concurrent.futures import CancelledError, Future
from contextvars import copy_context
from functools import partial

import pytest

from core.errors import RateLimited
from core.tenant_slots import TenantSlots
from gateway.edge.threads import TenantThreads, Work, current_tenant, run_queued


class Pool:
    """Its work waits for the test, and notes who ran."""

    def __init__(self, threads: int) -> None:
        self.threads = TenantThreads(threads, "test")
        self.let_go, self.ran = threading.Semaphore(0), list[str]()
        self.begun = threading.Semaphore(0)

    def submit(self, tenant: str, count: int = 1) -> list[Future[None]]:
        def _work() -> None:
            self.ran.append(tenant)
            self.begun.release()
            assert self.let_go.acquire(timeout=60)

        def _submit() -> Future[None]:
            current_tenant.set(tenant)
            return self.threads.submit(_work)

        return [copy_context().run(_submit) for _ in range(count)]

    def begins(self, count: int) -> None:
        for _ in range(count):
            assert self.begun.acquire(timeout=60)
        assert not self.begun.acquire(timeout=0.05)


def test_a_tenant_has_half_of_the_threads_and_the_gateway_itself_all() -> None:
    pool = Pool(4)
    made = pool.submit("hostile", 10) + pool.submit("victim") + pool.submit("", 3)
    pool.begins(4)
    assert sorted(pool.ran) == ["", "hostile", "hostile", "victim"]
    pool.let_go.release(20)
    for each in made:
        each.result(60)
    assert sorted(pool.ran) == sorted([*["hostile"] * 10, "victim", *[""] * 3])
    pool.threads.shutdown()


def test_tenants_take_turns() -> None:
    pool = Pool(1)
    made = pool.submit("") + pool.submit("a", 3) + pool.submit("b", 2) + pool.submit("c")
    pool.let_go.release(7)
    for each in made:
        each.result(60)
    assert pool.ran == ["", "a", "b", "c", "a", "b", "a"]
    pool.threads.shutdown()


def test_errors_and_cancelled_work_leave_the_share_free() -> None:
    pool = Pool(2)
    (running,) = pool.submit("a")
    cancelled, last = pool.submit("a", 2)
    assert cancelled.cancel()
    pool.let_go.release(2)
    running.result(60), last.result(60)
    assert pool.ran == ["a", "a"]
    with pytest.raises(ZeroDivisionError):
        pool.threads.submit(lambda: 1 / 0).result(60)
    pool.threads.shutdown()


@pytest.mark.parametrize("cancel", [False, True])
def test_a_pool_that_ends_does_or_cancels_what_waits(cancel: bool) -> None:
    pool = Pool(1)
    first, second = pool.submit("a", 2)
    pool.begins(1)
    ending = threading.Thread(target=pool.threads.shutdown, kwargs={"cancel_futures": cancel})
    ending.start()
    pool.let_go.release(2)
    ending.join(60)
    first.result(60)
    if cancel:
        with pytest.raises(CancelledError):
            second.result(60)
    else:
        second.result(60)
    with pytest.raises(RuntimeError):
        pool.threads.submit(print)


async def test_slots_of_a_tenant_wait_for_its_own_only() -> None:
    slots = TenantSlots(1)
    release = await slots.take("a")
    waiting = asyncio.ensure_future(slots.take("a"))
    given_up = asyncio.ensure_future(slots.take("a"))
    async with slots.of("b"):
        await asyncio.sleep(0)
        assert not waiting.done()
    given_up.cancel()
    release()
    release()  # a second time does nothing
    (await waiting)()
    async with slots.of("a"):
        pass
    assert not slots._slots, "nothing is kept of tenants that call no more"


async def test_long_work_of_a_tenant_runs_one_at_a_time_and_more_is_refused() -> None:
    go, ran = threading.Event(), list[str]()

    def _work(tenant: str) -> str:
        ran.append(tenant)
        assert go.wait(60)
        return tenant

    def _queue(tenant: str) -> asyncio.Task[str]:
        work = partial(_work, tenant)
        return asyncio.create_task(run_queued(Work.ERASURES, tenant, 3, work))

    first = [_queue("a") for _ in range(3)]
    other = _queue("b")
    while len(ran) < 2:
        await asyncio.sleep(0.01)
    assert ran == ["a", "b"]
    with pytest.raises(RateLimited, match="3 erasures of the organisation") as refused:
        await run_queued(Work.ERASURES, "a", 3, partial(_work, "a"))
    assert refused.value.retry_after_s and refused.value.code == "too_many_erasures"
    first[0].cancel()  # its client leaves: what has begun goes on, and counts
    await asyncio.sleep(0)
    with pytest.raises(RateLimited):
        await run_queued(Work.ERASURES, "a", 3, partial(_work, "a"))
    go.set()
    assert await asyncio.gather(other, *first[1:]) == ["b", "a", "a"]
    assert await run_queued(Work.ERASURES, "a", 1, partial(_work, "a")) == "a"
