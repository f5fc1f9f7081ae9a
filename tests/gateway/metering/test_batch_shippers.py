"""The process that ships under load: what it carries is in the books once, whenever it is killed."""

import asyncio
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs
from sqlalchemy import select

from billing.pricing.prices import ensure_default_prices
from billing.usage.tables import UsageEventRow
from core.clock import SystemClock
from core.database import Database
from core.events import UsageEvent
from gateway.metering.batch_shippers import ProcessShipper, ProcessShipperFailed
from gateway.metering.shipper import Shipper
from gateway.metering.spool import Spool, SpoolFile
from gateway.metering.usage_sink import SqlUsageSink
from tests.gateway.metering.spool_rows import closed
from tests.migrated import migrated


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = migrated(f"sqlite:///{tmp_path}/books.db")
    yield made
    made.close()


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(SpoolFile(tmp_path / "spool.db"))
    yield made
    made.file.close()


@pytest.fixture
def helper(tmp_path: Path, database: Database, spool: Spool) -> Iterator[ProcessShipper]:
    made = ProcessShipper(spool.file.path, f"sqlite:///{tmp_path}/books.db", "error", "console")
    yield made
    made.close()


@pytest.fixture
def price(database: Database) -> str:
    with database.transaction() as session:
        return ensure_default_prices(session, SystemClock(), "m").id


def event(name: str, price: str) -> UsageEvent:
    return structs.replace(closed(name), price_version=price)


def booked(database: Database) -> list[str]:
    with database.read() as session:
        return sorted(session.scalars(select(UsageEventRow.request_id)))


async def test_a_killed_helper_loses_and_duplicates_nothing(
    spool: Spool, helper: ProcessShipper, database: Database, price: str
) -> None:
    for number in range(3):
        await spool.close(event(f"req_{number}", price))
    spool.file.fold()
    with pytest.raises(ProcessShipperFailed):
        helper._start = _dead(helper)  # type: ignore[method-assign]
        helper.ship(0, 100)
    del helper._start
    first = helper.ship(0, 2)
    assert (first.first, first.last, first.rows, first.refused) == (1, 2, 2, "")
    assert helper.pid is not None
    os.kill(helper.pid, signal.SIGKILL)
    with pytest.raises(ProcessShipperFailed):
        helper.ship(0, 100)
    again = helper.ship(0, 100)
    assert (again.first, again.last, again.rows) == (1, 3, 3)
    assert booked(database) == ["req_0", "req_1", "req_2"]
    assert helper.ship(3, 100).last == 0


def test_the_helper_is_told_the_settings_of_its_gateway_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, stream = "postgresql://a/b", "nats://c"
    helper = ProcessShipper(tmp_path / "1.db", url, "info", "json", stream_url=stream)
    answer = json.dumps({"first": 1, "last": 2, "rows": 2, "cpu_s": 0.5}).encode() + b"\n"
    process = SimpleNamespace(stdin=io.BytesIO(), stdout=io.BytesIO(answer * 2))
    monkeypatch.setattr(helper, "_start", lambda: process)
    assert [helper.ship(after, 5).last for after in (0, 2)] == [2, 2]
    assert [json.loads(line) for line in process.stdin.getvalue().splitlines()] == [
        {
            "spool": str(tmp_path / "1.db"),
            "database": url,
            "level": "info",
            "format": "json",
            "stream": stream,
        },
        [0, 5],
        [2, 5],
    ]


async def test_the_shipper_calls_for_help_when_there_is_much_and_goes_on_when_it_dies(
    spool: Spool,
    helper: ProcessShipper,
    database: Database,
    price: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.metering.shipper._MANY", 20)
    spool.bind(asyncio.get_running_loop())
    shipper = Shipper(spool, SqlUsageSink(database, SystemClock()), helper, pause_s=0.01)
    await spool.close(event("req_a", price))
    shipper.start()
    names = ["req_a"]
    async with asyncio.timeout(180):
        while shipper.backlog():
            await asyncio.sleep(0.02)
        assert helper.pid is None, "an idle gateway starts no process"
        for _ in range(3):
            more = [f"req_{len(names) + number}" for number in range(30)]
            names += more
            await asyncio.gather(*[spool.close(event(name, price)) for name in more])
            while shipper.backlog():
                await asyncio.sleep(0.02)
            if helper.pid is not None:
                os.kill(helper.pid, signal.SIGKILL)
    assert helper.pid is not None
    await asyncio.to_thread(shipper.stop)
    assert booked(database) == sorted(names)
    assert helper.pid is None


def _dead(helper: ProcessShipper):  # type: ignore[no-untyped-def]
    """A start whose process is killed before it reads a word."""
    plain = helper._start

    def _start():  # type: ignore[no-untyped-def]
        process = plain()
        process.kill()
        process.wait()
        return process

    return _start
