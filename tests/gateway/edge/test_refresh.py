"""In-memory views follow the database when something changed, and only then."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from core.clock import FakeClock
from core.database import Database
from core.tenants import audit
from core.tenants.key_cache import KeyCache
from gateway.edge import refresh

SOON_S = 30.0  # a bound against hanging, not a promise


class View:
    """Counts how often it was read; fails while it is told to."""

    def __init__(self) -> None:
        self.times = 0
        self.fails = False
        self.tried = threading.Event()

    def refresh(self) -> None:
        try:
            if self.fails:
                raise OSError("the database is away")
            self.times += 1
        finally:
            self.tried.set()

    async def tried_again(self) -> None:
        self.tried.clear()
        assert await asyncio.to_thread(self.tried.wait, SOON_S)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(refresh, "POLL_S", 0.001)
    yield


def _change(database: Database, clock: FakeClock, key_cache: KeyCache) -> None:
    with database.transaction() as session:
        audit.record_operator(
            session, clock, "operator", "test.change", "it", before=None, after=None
        )
    key_cache.poll()


async def test_a_change_is_read_once_and_nothing_is_read_without_one(
    database: Database, clock: FakeClock, quick: None
) -> None:
    key_cache, view = KeyCache(database, clock), View()
    key_cache.poll()
    work = asyncio.create_task(refresh.refresh_on_change(key_cache, view.refresh, "it"))
    await asyncio.to_thread(view.tried.wait, SOON_S)
    await asyncio.sleep(0.05)  # fifty looks
    assert view.times == 1
    view.tried.clear()
    _change(database, clock, key_cache)
    assert await asyncio.to_thread(view.tried.wait, SOON_S)
    assert view.times == 2
    work.cancel()


async def test_what_could_not_be_read_is_tried_until_it_can(
    database: Database, clock: FakeClock, quick: None
) -> None:
    key_cache, view = KeyCache(database, clock), View()
    view.fails = True
    work = asyncio.create_task(refresh.refresh_on_change(key_cache, view.refresh, "it"))
    await view.tried_again()
    await view.tried_again()
    assert view.times == 0
    view.fails = False
    async with asyncio.timeout(SOON_S):
        while view.times == 0:
            await view.tried_again()
    work.cancel()
