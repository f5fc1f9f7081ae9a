"""Batches under limits, unpaid invoices and other tenants' batches."""

import asyncio
import time
from datetime import timedelta
from pathlib import Path

from openai import OpenAI
from sqlalchemy import select

from core.batches import jobs
from core.batches.models import Batch
from core.clock import FakeClock, SystemClock
from core.settings import Settings
from core.tenants.organisations import create_tenant, set_unpaid
from core.tenants.plans import DAY, FREE, HOUR, LimitRule, Scope, Unit, for_batches, with_rules
from gateway.serving.batches.runner import FairSlots
from tests.gateway.deployment import Deployment
from tests.gateway.serving.test_batches import many, slow, start, wait
from tests.migrated import migrated

__all__ = ["slow"]


def test_day_key_and_concurrency_limits_hold_for_batches() -> None:
    own = (
        LimitRule(Scope.KEY, Unit.TOTAL_TOKENS, 500),
        LimitRule(Scope.TENANT, Unit.OUTPUT_TOKENS, 500, HOUR),
        LimitRule(Scope.MODEL, Unit.OUTPUT_TOKENS, 500, DAY),
    )
    names = {rule.name for rule in for_batches(with_rules(FREE, own)).rules}
    assert names == {
        "tenant:concurrent",
        "tenant:requests:86400",
        "key:total_tokens:60",
        "model:output_tokens:86400",
    }


async def test_slots_are_shared_by_tenant_and_not_by_line() -> None:
    slots = FairSlots(1)
    order: list[str] = []

    async def _line(tenant: str) -> None:
        async with slots.hold(tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    big = [asyncio.create_task(_line("big")) for _ in range(20)]
    await asyncio.sleep(0)
    small = [asyncio.create_task(_line("small")) for _ in range(3)]
    await asyncio.gather(*big, *small)
    last_small = max(place for place, tenant in enumerate(order) if tenant == "small")
    assert last_small <= 8, order


async def test_a_line_that_is_cancelled_while_it_waits_takes_no_slot() -> None:
    slots = FairSlots(1)
    held: list[float] = []

    async def _hold(seconds: float) -> None:
        async with slots.hold("t"):
            held.append(seconds)
            await asyncio.sleep(seconds)

    first = asyncio.create_task(_hold(0.01))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(_hold(60))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(first, waiting, return_exceptions=True)
    await asyncio.wait_for(_hold(0), 10)
    assert held == [0.01, 0]


def _batch(tenant_id: str, number: int, clock: FakeClock) -> Batch:
    return Batch(
        id=f"batch_{number:03}",
        tenant_id=tenant_id,
        project_id="p",
        key_id="k",
        endpoint="/v1/chat/completions",
        input_file_id="f",
        completion_window="24h",
        status="in_progress",
        labels={},
        errors=[],
        created_at=clock.now(),
        expires_at=clock.now() + timedelta(hours=24),
    )


def test_the_tenant_with_the_fewest_running_batches_is_next(tmp_path: Path) -> None:
    clock = FakeClock()
    database = migrated(Settings(data_dir=tmp_path).effective_database_url)
    with database.transaction() as session:
        big, small = (create_tenant(session, clock, name=name).id for name in ("big", "small"))
        session.add_all(_batch(big, number, clock) for number in range(10))
        session.add(_batch(small, 10, clock))
    claimed: list[str] = []
    with database.transaction() as session:
        while batch := jobs.claim(session, "run", clock.now(), claimed):
            claimed.append(batch.id)
        tenants = {each.id: each.tenant_id for each in session.scalars(select(Batch))}
    database.close()
    assert [tenants[each] for each in claimed] == [big, small, big, big, big]


def test_the_batches_of_an_unpaid_tenant_wait(slow: tuple[Deployment, OpenAI]) -> None:
    deployment, client = slow
    batch_id = start(client, *many(200)).id
    wait(client, batch_id, lambda found: found.request_counts.completed > 0)
    with deployment.services.database.transaction() as session:
        set_unpaid(session, SystemClock(), deployment.tenant_id, True)
    deadline = time.monotonic() + 60
    sent = -1
    while sent != (sent := len(deployment.engine.submitted)):  # the running lines end
        assert time.monotonic() < deadline
        time.sleep(1.5)
    with deployment.services.database.read() as session:
        found = session.get_one(Batch, batch_id)
        assert (found.status, found.failed) == ("in_progress", 0)
        assert 0 < found.completed < 200
