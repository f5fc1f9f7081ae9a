"""A spool on a disk that is really full, not one whose errors are made up."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import Unavailable
from gateway.metering.shipper import Shipper
from gateway.metering.spool import Spool, SpoolFile
from tests.gateway.metering.spool_rows import closed, opened
from tests.gateway.metering.test_spool import Books
from tests.small_disk import fill, free, small_disk

PROTECTS = ("gateway/metering",)
pytestmark = pytest.mark.proof


async def fulfilled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.02)


async def open_until_refused(spool: Spool, prefix: str) -> list[str]:
    """The requests that were accepted before one was refused."""
    accepted: list[str] = []
    for number in range(100_000):
        name = f"req_{prefix}{number:05d}"
        try:
            await spool.open(opened(name))
        except Unavailable as error:
            assert error.code == "spool_unavailable"
            return accepted
        accepted.append(name)
    raise AssertionError("the disk was never full")


@pytest.mark.parametrize("is_down", [False, True], ids=["alone", "and the database is down"])
async def test_while_the_disk_is_full_requests_are_refused_and_nothing_is_lost(
    tmp_path: Path, is_down: bool
) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        spool, books = Spool(SpoolFile(disk / "spool" / "1.db", reserve=0)), Books()
        spool.bind(asyncio.get_running_loop())
        books.down = is_down
        shipper = Shipper(spool, books, pause_s=0.01)
        shipper.start()
        names = [f"req_{number}" for number in range(100)]
        for name in names:
            await spool.open(opened(name))
        for name in names[:50]:
            await spool.close(closed(name))
        fill(disk)
        names += await open_until_refused(spool, "late")
        for name in names[50:]:
            await spool.close(closed(name))
        await asyncio.sleep(2.5)  # the shipper and the spool try again meanwhile, in vain
        free(disk)
        books.down = False
        await fulfilled(lambda: sorted(books.got) == sorted(names) and not shipper.backlog())
        assert len(books.times) == len(names), "each once"
        await spool.open(opened("req_new"))
        assert [each.request_id for each in spool.file.open_requests()] == ["req_new"]
        assert spool.file.parked() == 0
        await asyncio.to_thread(shipper.stop, 30)
        spool.file.close()


async def test_a_spool_that_filled_the_disk_by_itself_empties_it_by_itself(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2) as disk:
        spool, books = Spool(SpoolFile(disk / "spool" / "1.db", reserve=2**19)), Books()
        spool.bind(asyncio.get_running_loop())
        books.down = True
        shipper = Shipper(spool, books, pause_s=0.01)
        shipper.start()
        names: list[str] = []
        for turn in range(200):
            try:
                for number in range(50):
                    await spool.open(opened(name := f"req_{turn:03d}{number:03d}"))
                    names.append(name)
                    await spool.close(closed(name))
                await asyncio.sleep(0.02)  # in which the shipper folds
            except Unavailable:
                break
        else:
            raise AssertionError("the disk was never full")
        books.down = False
        await fulfilled(lambda: sorted(books.got) == sorted(names) and not shipper.backlog())
        assert len(books.times) == len(names), "each once"
        await fulfilled(spool.file.has_room)  # once the file has given back what it took
        await spool.open(opened("req_new"))
        await asyncio.to_thread(shipper.stop, 30)
        spool.file.close()
