"""Issue 14, part 5: what a cap holds is the sum of live reservations, however a gateway process dies,
and the audit compares the two."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from billing.notices import budgets
from core.clock import FakeClock, SystemClock
from core.counters import BucketRequest, Cap, Counters, Hold
from core.counters_memory import MemoryCounters
from core.counters_redis import RedisCounters
from core.database import Database
from core.errors import DependencyDown
from core.money import Money
from gateway.admission.held_money import held_money_differences
from gateway.cli.main import main
from tests.billing.conftest import deployment_of
from tests.conftest import REDIS, need_redis
from tests.contracts.redis_keys import forget, new_prefix
from tests.gateway.admission.endings import SECOND, Gateway, Way


@pytest.fixture(params=["memory", "redis"])
async def counters(request: pytest.FixtureRequest, clock: FakeClock) -> AsyncIterator[Counters]:
    if request.param == "memory":
        yield MemoryCounters(clock)
        return
    need_redis()
    made = RedisCounters(REDIS, prefix=new_prefix(), clock=clock, timeout_s=10)
    yield made
    await made.close()
    forget(made._prefix)


def change_held(counters: Counters, nano: int) -> None:
    """The seeded fault: money that no reservation accounts for."""
    if isinstance(counters, MemoryCounters):
        counters._accounts[("org", "m")].held += nano
        return
    assert isinstance(counters, RedisCounters)
    script = """
        local spent, held, seeded = struct.unpack('<ddd', redis.call('GET', KEYS[1]))
        redis.call('SET', KEYS[1], struct.pack('<ddd', spent, held + tonumber(ARGV[1]), seeded))
    """
    key = f"{{{counters._prefix}:org}}:c:m"
    redis.Redis.from_url(REDIS, socket_timeout=10).eval(script, 1, key, str(nano))


async def test_the_audit_finds_held_money_without_a_reservation(counters: Counters) -> None:
    for name in ("a", "b"):
        hold = Hold(10, 40, (Cap("m", 1_000, 0),))
        await counters.reserve(BucketRequest("org", name, 30_000, hold=hold))
    keys = {"org": ["m", "unused"], "other": ["m"]}
    assert await held_money_differences(counters, keys) == []
    change_held(counters, 7)
    (found,) = await held_money_differences(counters, keys)
    assert (found.check, found.tenant_id, found.units) == ("reservations/holds", "org", 7_000)
    assert "holds 87 nano-units, but its reservations 80" in found.message


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    made = Gateway(tmp_path)
    yield made
    made.close()


async def held(gateway: Gateway) -> int:
    found, reserved = await gateway.held()
    assert found == reserved
    return found


@pytest.mark.parametrize("killed", ["before its record", "after its record"])
async def test_a_process_that_is_killed_leaves_no_hold_that_nothing_settles(
    gateway: Gateway, killed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is stopped as by a kill: neither its `finally` nor its settlement does anything."""
    services = gateway.services
    admission = services.pipeline.admission
    reached, forever = asyncio.Event(), asyncio.Event()

    async def _stop(*_given: object) -> None:
        reached.set()
        await forever.wait()

    if killed == "before its record":
        monkeypatch.setattr(services.spool, "open", _stop)
    else:
        monkeypatch.setattr(gateway.engines[SECOND], "generate", _stop)

    async def _nothing(*_given: object) -> None:
        return

    running = asyncio.ensure_future(gateway.run(Way()))
    await asyncio.wait_for(reached.wait(), 20)
    assert await held(gateway) > 0
    monkeypatch.setattr(admission._limiter, "settle", _nothing)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    gateway.clock.advance(31)
    assert (await held(gateway) > 0) == (killed == "after its record")


async def test_what_the_counters_did_not_hear_is_repeated(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, answers = gateway.services, [DependencyDown("Redis does not answer.")]
    reached, forever = asyncio.Event(), asyncio.Event()
    assert isinstance(services.counters, MemoryCounters)
    plain = services.counters.keep_now

    async def _keep(group: str, id: str) -> None:
        if answers:
            raise answers.pop()
        plain(group, id)

    async def _stop(*_given: object) -> None:
        reached.set()
        await forever.wait()

    monkeypatch.setattr(services.counters, "keep_now", None)  # as counters that are far away
    monkeypatch.setattr(services.counters, "keep", _keep)
    monkeypatch.setattr(gateway.engines[SECOND], "generate", _stop)
    running = asyncio.ensure_future(gateway.run(Way()))
    await asyncio.wait_for(reached.wait(), 20)
    async with asyncio.timeout(20):
        while answers:
            await asyncio.sleep(0.01)
    leases = services.limiter._leases
    await leases._renew()
    gateway.clock.advance(31)
    assert await held(gateway) > 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await held(gateway) == 0


def test_the_command_exits_1_on_held_money_without_a_reservation(
    sqlite_database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    need_redis()
    lite = deployment_of(sqlite_database, FakeClock(SystemClock().now()))
    with lite.database.transaction() as session:
        budget = budgets.create(
            session, lite.clock, tenant_id="acme", scope="tenant", scope_id="acme", window="total",
            cap=Money(10**15),
        )  # fmt: skip
        key = f"{budget.id}:total"  # a budget of its own, so that tests side by side do not meet
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", lite.database.url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TOLLHOUSE_REDIS_URL", REDIS)
    assert main(["audit", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == []
    name = f"{{tollhouse:acme}}:c:{key}"
    client = redis.Redis.from_url(REDIS, socket_timeout=10)
    try:
        client.eval(
            "redis.call('SET', KEYS[1], struct.pack('<ddd', 0, 500, 1), 'PX', '60000')", 1, name
        )
        assert main(["audit", "--json"]) == 1
        (found,) = json.loads(capsys.readouterr().out)["differences"]
        assert found["check"] == "reservations/holds" and found["units"] == 500_000
    finally:
        client.delete(name)
