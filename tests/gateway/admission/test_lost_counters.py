"""Redis loses its data, or the process its memory: what is spent and held is rebuilt before a request
is admitted."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from core.clock import SystemClock
from core.counters_redis import RedisCounters
from core.errors import InsufficientQuota
from core.tenants.plans import Plan
from gateway.admission.limiter import Limiter
from gateway.admission.prices import Owner
from gateway.admission.request import AdmissionRequest, MoneyLimit, SettledUsage
from gateway.admission.seeding import Seeding
from tests.conftest import REDIS, need_redis
from tests.contracts.redis_keys import forget, new_prefix
from tests.gateway.admission.owners import Owners

UNIT = 1000  # picounits of a nano-unit
PLAN = Plan("test", (), 1, 1)
LIMIT = MoneyLimit("budget", 1000 * UNIT, 0)
REQUEST = AdmissionRequest(
    "req_0",
    "org_a",
    "proj_a",
    "key_a",
    "demo",
    PLAN,
    prompt_tokens=5,
    max_output_tokens=10,
    money=(LIMIT,),
    base_cost_units=0,
    output_cost_units=10 * UNIT,
)


@dataclass
class Ledger(Owners):
    """The database's part: what is stored, in picounits."""

    units: int = 0
    reads: int = 0
    stored: asyncio.Event = field(default_factory=asyncio.Event)

    async def read_limits(self, _owner: Owner) -> tuple[MoneyLimit, ...]:
        self.reads += 1
        return (replace(LIMIT, spent_units=self.units),)

    async def all_stored(self) -> None:
        await self.stored.wait()


class Site:
    """Gateways on one Redis, under a prefix of the test's own."""

    def __init__(self) -> None:
        self.prefix = new_prefix()
        self.ledger = Ledger()
        self.counters: list[RedisCounters] = []

    async def gateway(self, settle_s: float = 0.3) -> Limiter:
        counters = RedisCounters(REDIS, prefix=self.prefix, timeout_s=10)
        self.counters.append(counters)
        await counters.start()
        made = Limiter(counters, SystemClock())
        made.seeding = Seeding(
            counters,
            self.ledger,  # type: ignore[arg-type]
            settle_s=settle_s,
            stored=self.ledger.all_stored,
        )
        await made._leases.restore_lost()
        return made

    async def lose_all(self) -> None:
        await asyncio.to_thread(forget, self.prefix)

    async def close(self) -> None:
        for each in self.counters:
            await each.close()
        await self.lose_all()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    need_redis()
    made = Site()
    yield made
    await made.close()


async def test_running_requests_of_all_gateways_hold_their_money_after_a_loss(site: Site) -> None:
    """1,000 may be spent: 600 are, two requests hold 100 each, so two more fit and a third does not."""
    site.ledger.units = 600 * UNIT
    site.ledger.stored.set()
    one, two = await site.gateway(), await site.gateway()
    first = await one.reserve(replace(REQUEST, request_id="r1"))
    second = await two.reserve(replace(REQUEST, request_id="r2"))
    await site.lose_all()
    for each in (one, two):  # as their loops do every half second
        assert await each._leases.restore_lost() == 1
    third = await one.reserve(replace(REQUEST, request_id="r3"))
    fourth = await two.reserve(replace(REQUEST, request_id="r4"))
    with pytest.raises(InsufficientQuota):
        await one.reserve(replace(REQUEST, request_id="r5"))
    full = SettledUsage(5, 0, 10, cost_units=100 * UNIT)
    for gateway, held in ((one, first), (two, second), (one, third), (two, fourth)):
        await gateway.settle(held, full)
    with pytest.raises(InsufficientQuota):
        await two.reserve(replace(REQUEST, request_id="r6"))


async def test_a_request_that_ends_right_after_the_loss_is_counted(site: Site) -> None:
    site.ledger.stored.set()
    gateway = await site.gateway()
    held = await gateway.reserve(replace(REQUEST, request_id="r1"))
    await site.lose_all()
    await gateway.settle(held, SettledUsage(5, 0, 10, cost_units=950 * UNIT))
    again = await gateway.reserve(replace(REQUEST, request_id="r2", max_output_tokens=5))
    assert again.covered == 5


async def test_nothing_is_admitted_before_usage_is_stored(site: Site) -> None:
    ledger, gateway = site.ledger, await site.gateway(settle_s=0.0)
    requests = [
        asyncio.create_task(gateway.reserve(replace(REQUEST, request_id=f"r{number}")))
        for number in range(5)
    ]
    await asyncio.sleep(0.1)
    assert not any(each.done() for each in requests)
    ledger.units = 995 * UNIT  # the spool is shipped
    ledger.stored.set()
    answers = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(each, InsufficientQuota) for each in answers), answers
    assert ledger.reads == 1


async def test_a_settlement_that_lingers_is_sent_before_the_counters_close(site: Site) -> None:
    site.ledger.stored.set()
    one, two = await site.gateway(), await site.gateway()
    held = await one.reserve(replace(REQUEST, request_id="r1"))
    ending = asyncio.create_task(one.settle(held, SettledUsage(5, 0, 10, cost_units=950 * UNIT)))
    while not site.counters[0]._pending:
        await asyncio.sleep(0)
    await site.counters.pop(0).close()
    async with asyncio.timeout(5):
        await ending
    fits = await two.reserve(replace(REQUEST, request_id="r2", max_output_tokens=5))
    assert fits.covered == 5
    with pytest.raises(InsufficientQuota):
        await two.reserve(replace(REQUEST, request_id="r3", max_output_tokens=1))
