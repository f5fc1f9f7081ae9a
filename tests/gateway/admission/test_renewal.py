"""The task of the leases, and waits that are cut: nothing stays taken, and nothing is asked too often."""

import asyncio
from contextlib import suppress

import pytest

from core import metrics
from core.clock import FakeClock
from gateway.admission import leases as leases_module
from gateway.admission.leases import Leases
from gateway.admission.queue import TenantQueues
from gateway.admission.reservation import plan_buckets
from gateway.admission.seeding import Seeding
from tests.gateway.admission.owners import Owners
from tests.gateway.admission.test_leases import REQUEST, Shared, failover, leased
from tests.gateway.admission.test_waiting import DENIED, Turns
from tests.gateway.admission.test_waiting import REQUEST as WAITING


async def _run_until(leases: Leases, shared: Shared, looks: int) -> None:
    """The task, until it has looked so many times for lost data."""
    task = asyncio.create_task(leases.run())
    while sum(each[0] == "born" for each in shared.asked) < looks:
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_leases_are_renewed_in_their_interval_and_not_at_each_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases_module, "RETRY_EVERY_S", 0.0)
    for interval, renewed in ((3_600.0, False), (0.0, True)):
        monkeypatch.setattr(leases_module, "RENEW_EVERY_S", interval)
        shared = Shared()
        leases = Leases(shared)  # type: ignore[arg-type]
        leases.add(leased(shared))
        await _run_until(leases, shared, 4)
        assert any(each[0] == "renew" for each in shared.asked) is renewed


async def test_owed_settlements_are_tried_again_by_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases_module, "RETRY_EVERY_S", 0.0)
    shared = Shared()
    leases = Leases(shared)  # type: ignore[arg-type]
    shared.away = True
    await leases.end(shared, "org_a", "req_1", [3], 7)  # type: ignore[arg-type]
    shared.away = False
    await _run_until(leases, shared, 2)
    assert ("settle", "org_a", "req_1", [3], 7) in shared.asked


async def test_the_metric_tells_when_limits_are_shared_again() -> None:
    shared = Shared()
    counters, planned = failover(shared, "local"), plan_buckets(REQUEST, 1)
    shared.away = True
    await counters.reserve(shared, planned, REQUEST, 1)  # type: ignore[arg-type]
    assert metrics.limit_mode._value.get() == 1
    shared.away = False
    await counters.reserve(shared, planned, REQUEST, 1)  # type: ignore[arg-type]
    assert metrics.limit_mode._value.get() == 0


async def test_who_is_cancelled_while_he_waits_is_only_cancelled() -> None:
    queues, turns = TenantQueues(FakeClock()), Turns(DENIED)
    waiting = asyncio.create_task(queues.wait(WAITING, turns))  # type: ignore[arg-type]
    while not turns.asked:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert turns.settled == []


async def test_who_is_cancelled_as_he_is_admitted_gives_it_back() -> None:
    queues, turns = TenantQueues(FakeClock()), Turns(None)

    def _admitted() -> object:
        asyncio.get_running_loop().call_soon(waiting.cancel)
        return turns.reservation()

    turns.answers = [_admitted]
    waiting = asyncio.create_task(queues.wait(WAITING, turns))  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert turns.settled == [("org_a", "req_1", [0, 0], 0)]


async def test_a_running_request_is_entered_again_before_its_account_is_seeded() -> None:
    steps: list[object] = []

    class _Counters(Shared):
        async def seed(self, group: str, caps: object) -> None:
            self._note("seed", group, caps)

    class _Prices(Owners):
        async def read_limits(self, _owner: object) -> tuple[()]:
            return ()

    async def _stored() -> None:
        steps.append("stored")

    counters = _Counters()
    seeding = Seeding(counters, _Prices(), settle_s=0.0, stored=_stored)  # type: ignore[arg-type]
    held = leased(counters)
    held.planned, held.request = plan_buckets(REQUEST, 1), REQUEST
    await seeding.recover(held)  # type: ignore[arg-type]
    assert counters.calls() == [("restore", "req_1", 3), ("seed", "org_a", ())]
    assert steps == ["stored"]
