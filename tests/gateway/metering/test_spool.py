"""The spool and what takes it on: durable first, shipped once, adopted from the dead, never lost."""

import asyncio
import errno
import shutil
import struct
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from core.clock import FakeClock
from core.database import Database
from core.errors import Unavailable
from core.events import EngineCount, OpenedRequest, SettledBy, UsageEvent
from engine.protocol import FinishReason, Receipt
from gateway.metering.meter import Ending, counts_of
from gateway.metering.recovery import Recovery
from gateway.metering.shipper import Shipper
from gateway.metering.spool import Spool, SpoolFile
from gateway.metering.spool_records import OutboxBatch
from gateway.metering.spool_statements import (
    delete_shipped,
    insert_opened,
    insert_receipt,
    move_to_outbox,
)
from gateway.metering.usage_sink import SqlUsageSink, stored_counts
from gateway.request.engine import RequestStillRunning
from tests.gateway.deployment import MODEL, Deployment
from tests.gateway.metering.spool_rows import NOW, closed, opened
from tests.migrated import migrated


def receipt(name: str, *, generated: int = 7, delivered: int = 6) -> Receipt:
    return Receipt(
        name, "org_a", None, 10, 4, 6, 0, generated, delivered, 0, 0, FinishReason.ABORT, 0, 0, 0
    )


def as_if_killed(file: SpoolFile, folder: Path) -> SpoolFile:
    """What the process of this file would leave if it were killed now, adopted."""
    folder.mkdir()
    for path in file.path.parent.glob(f"{file.path.name}*"):
        if path.suffix != ".lock":
            shutil.copy(path, folder)
    return SpoolFile(folder / file.path.name)


class Books:
    def __init__(self) -> None:
        self.got: dict[str, UsageEvent] = {}
        self.times: list[str] = []
        self.down = False
        self.refused: set[str] = set()

    def record(self, batch: OutboxBatch) -> None:
        if self.down:
            raise OperationalError("insert", {}, Exception("the server is away"))
        for event in batch.usage:
            if event.request_id in self.refused:
                raise ValueError("this event makes no sense")
        for event in batch.usage:
            self.times.append(event.request_id)
            self.got[event.request_id] = event

    def park(self, batch: OutboxBatch, reason: str) -> None:
        raise ValueError(reason)


class Receipts:
    def __init__(self) -> None:
        self.known: dict[str, Receipt | None] = {}
        self.running: set[str] = set()
        self.silent = False
        self.acknowledged: list[str] = []

    async def receipts_of(self, record: OpenedRequest) -> list[Receipt]:
        if self.silent:
            raise Unavailable("no engine")
        if record.request_id in self.running:
            raise RequestStillRunning("runs")
        found = self.known.get(record.request_id)
        return [found] if found is not None else []

    async def acknowledge(self, request_ids: list[str]) -> None:
        self.acknowledged += request_ids


async def _ignore(_event: UsageEvent) -> None:
    return


def recovery(tmp_path: Path, books: Books, receipts: Receipts, clock: FakeClock) -> Recovery:
    own = tmp_path / "own.db"
    return Recovery(tmp_path, own, books, receipts, clock, longest_life_s=600, on_settled=_ignore)


async def test_one_event_loop_turn_is_one_durable_commit(tmp_path: Path) -> None:
    spool = Spool(SpoolFile(tmp_path / "a.db"))
    spool.bind(asyncio.get_running_loop())
    await asyncio.gather(*(spool.open(opened(f"req_{i}")) for i in range(50)))
    [log] = tmp_path.glob("a.db.log-*")
    length, checksum = struct.unpack("<II", log.read_bytes()[:8])
    payload = log.read_bytes()[8:]
    assert (length, checksum) == (len(payload), zlib.crc32(payload)), "one frame is all of it"
    left = as_if_killed(spool.file, tmp_path / "left")
    assert [each.request_id for each in left.open_requests()] == sorted(
        f"req_{i}" for i in range(50)
    )
    left.close()
    await asyncio.gather(*(spool.close(closed(f"req_{i}")) for i in range(50)))
    assert spool.file.open_requests() == []
    spool.file.close()


async def test_a_second_process_cannot_take_a_living_ones_file(tmp_path: Path) -> None:
    first = SpoolFile(tmp_path / "a.db")
    with pytest.raises(OSError, match="unavailable"):
        SpoolFile(tmp_path / "a.db")
    first.close()
    SpoolFile(tmp_path / "a.db").close(remove=True)


def test_a_number_that_was_shipped_never_comes_again_and_an_adopted_file_counts_on(
    tmp_path: Path,
) -> None:
    def numbers(file: SpoolFile) -> list[int]:
        return [seq for (seq,) in file.connection.execute("select seq from outbox order by seq")]

    file = SpoolFile(tmp_path / "a.db")
    file.commit([*move_to_outbox(closed("req_1")), *move_to_outbox(closed("req_2"))])
    assert numbers(file) == [1, 2]
    file.commit([delete_shipped(2)])
    file.commit(move_to_outbox(closed("req_3")))
    assert numbers(file) == [3]
    file.close()
    adopted = SpoolFile(tmp_path / "a.db")
    adopted.commit(move_to_outbox(closed("req_4")))
    assert numbers(adopted) == [3, 4]
    adopted.close()


async def test_a_full_disk_refuses_openings_and_keeps_closings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(SpoolFile(tmp_path / "a.db"))
    spool.bind(asyncio.get_running_loop())
    await spool.open(opened("req_1"))
    plain = spool.file.append

    def _full(_statements: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool.file, "append", _full)
    with pytest.raises(Unavailable) as caught:
        await spool.open(opened("req_2"))
    assert caught.value.code == "spool_unavailable"
    durable: list[str] = []
    await spool.close(closed("req_1"), lambda: durable.append("req_1"))
    assert not durable, "the engine must keep its receipt while the record is in memory alone"
    monkeypatch.setattr(spool.file, "append", plain)
    await spool.open(opened("req_3"))
    assert durable == ["req_1"]
    assert [each.request_id for each in spool.file.open_requests()] == ["req_3"]
    count = spool.file.connection.execute("select count(*) from outbox").fetchone()
    assert count == (1,)
    spool.file.close()


async def test_the_shipper_waits_out_a_database_that_is_down_and_ships_once(
    tmp_path: Path,
) -> None:
    spool, books = Spool(SpoolFile(tmp_path / "a.db")), Books()
    spool.bind(asyncio.get_running_loop())
    books.down = True
    shipper = Shipper(spool, books, pause_s=0.01)
    shipper.start()
    for number in range(30):
        await spool.open(opened(f"req_{number}"))
        await spool.close(closed(f"req_{number}"))
    await asyncio.sleep(0.3)
    assert not books.got and shipper.backlog() == 30
    books.down = False
    async with asyncio.timeout(60):
        while shipper.backlog():
            await asyncio.sleep(0.02)
    assert sorted(books.got) == sorted(f"req_{i}" for i in range(30))
    assert len(books.times) == 30
    await asyncio.to_thread(shipper.stop)
    spool.file.close()


async def test_one_record_that_is_refused_for_good_is_parked_and_holds_up_nothing(
    tmp_path: Path,
) -> None:
    spool, books = Spool(SpoolFile(tmp_path / "a.db")), Books()
    spool.bind(asyncio.get_running_loop())
    books.refused = {"req_3"}
    for number in range(6):
        await spool.close(closed(f"req_{number}"))
    shipper = Shipper(spool, books, pause_s=0.01)
    shipper.start()
    async with asyncio.timeout(60):
        while shipper.backlog():
            await asyncio.sleep(0.02)
    await asyncio.to_thread(shipper.stop)
    assert sorted(books.got) == ["req_0", "req_1", "req_2", "req_4", "req_5"]
    parked = spool.file.connection.execute("select reason from parked").fetchall()
    assert parked == [("this event makes no sense",)]
    spool.file.close()


async def test_a_dead_processs_file_is_adopted_and_settled_by_the_receipt(tmp_path: Path) -> None:
    dead = SpoolFile(tmp_path / "dead.db")
    spool = Spool(dead)
    spool.bind(asyncio.get_running_loop())
    for name in ("req_1", "req_2", "req_3", "req_4"):
        await spool.open(opened(name))
    await spool.close(closed("req_4"))
    dead.close()
    books, receipts, clock = Books(), Receipts(), FakeClock(NOW)
    receipts.known["req_1"] = receipt("req_1")
    receipts.running.add("req_2")
    rescue = recovery(tmp_path, books, receipts, clock)
    assert await rescue.round() == 2
    first = books.got["req_1"]
    assert first.settled_by is SettledBy.RECEIPT
    # No stream of it had begun, so that nothing was delivered and nothing is charged.
    assert (first.input_tokens, first.cached_tokens) == (0, 0)
    assert (first.output_tokens, first.waived_tokens) == (0, 7)
    never = books.got["req_3"]
    assert (never.settled_by, never.output_tokens) == (SettledBy.EXPIRY, 0)
    assert "req_4" in books.got and "req_2" not in books.got
    assert receipts.acknowledged == ["req_1"]
    receipts.running.clear()
    receipts.known["req_2"] = receipt("req_2", generated=3, delivered=3)
    assert await rescue.round() == 1
    assert books.got["req_2"].waived_tokens == 3
    assert not list(tmp_path.glob("dead.db*"))


async def test_silent_engines_are_waited_for_until_no_request_can_live(tmp_path: Path) -> None:
    dead = SpoolFile(tmp_path / "dead.db")
    spool = Spool(dead)
    spool.bind(asyncio.get_running_loop())
    await spool.open(opened("req_1"))
    dead.close()
    books, receipts, clock = Books(), Receipts(), FakeClock(NOW)
    receipts.silent = True
    rescue = recovery(tmp_path, books, receipts, clock)
    assert await rescue.round() == 0
    clock.advance(timedelta(seconds=700).total_seconds())
    assert await rescue.round() == 1
    assert books.got["req_1"].settled_by is SettledBy.EXPIRY
    rescue.close()


def test_generated_is_always_billed_plus_waived() -> None:
    for delivered in range(8):
        ending = Ending(delivered, 7, "stop", 200, prompt_done=delivered > 0)
        counts = counts_of(10, ending, receipt("r"))
        assert counts.output == delivered and counts.output + counts.waived == 7
        alone = counts_of(10, ending, None)
        assert alone.output + alone.waived == 7
    late = replace(receipt("r"), generated=9)
    assert counts_of(10, Ending(3, 5, "x", 499, prompt_done=True), late).waived == 6


_TWO_THREADS = """
import sys, threading, time
from pathlib import Path
from gateway.metering.spool import SpoolFile
from gateway.metering.spool_statements import insert_moderation

sys.setswitchinterval(0.0005)  # as the server
file = SpoolFile(Path(sys.argv[1]))
done = threading.Event()

def count():
    while not done.is_set():
        file.parked()

thread = threading.Thread(target=count)
thread.start()
until = time.monotonic() + 2
while time.monotonic() < until:
    file.commit([insert_moderation(())])
done.set()
thread.join()
"""


def test_a_query_of_another_thread_does_not_stop_the_process(tmp_path: Path) -> None:
    """A function of Python's in SQL did: SQLite held the connection and waited for the interpreter,
    the other thread the reverse."""
    command = [sys.executable, "-c", _TWO_THREADS, str(tmp_path / "spool.db")]
    subprocess.run(command, cwd=Path(__file__).parents[3], check=True, timeout=60)


def test_the_shipper_leaves_the_connection_of_the_event_loop_alone(
    deployment: Deployment,
) -> None:
    threads: set[int] = set()
    connection = deployment.services.spool.file.connection
    connection.set_trace_callback(lambda _: threads.add(threading.get_ident()))
    try:
        for _ in range(3):
            body = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
            answer = httpx.post(
                f"{deployment.url}/v1/completions", json=body, headers=deployment.headers
            )
            assert answer.status_code == 200
            time.sleep(0.3)  # rounds of the shipper
    finally:
        connection.set_trace_callback(None)
    assert len(threads) == 1


class StoringBooks(Books):
    """Events in memory, receipts in a database."""

    def __init__(self, database: Database, clock: FakeClock) -> None:
        super().__init__()
        self._receipts = SqlUsageSink(database, clock)

    def record(self, batch: OutboxBatch) -> None:
        self._receipts.record(replace(batch, usage=[]))
        super().record(batch)


@pytest.mark.parametrize("stored", [True, False])
async def test_counts_that_were_stored_settle_what_an_upstream_has_no_receipt_of(
    tmp_path: Path, clock: FakeClock, stored: bool
) -> None:
    """An upstream's report was spooled and shipped, and then the gateway was killed: its event must
    not say less than the report that the audit compares it with."""
    database = migrated(f"sqlite:///{tmp_path / 'tollhouse.db'}")
    spools = tmp_path / "spools"
    left = SpoolFile(spools / "dead.db")
    left.commit([insert_opened(opened("req_1")), insert_opened(opened("req_2"))])
    if stored:
        left.commit([insert_receipt(EngineCount("req_1", "engine", 10, 4, 7, NOW))])
        left.commit([insert_receipt(EngineCount("req_2", "another", 10, 4, 7, NOW))])
    left.close()
    books = StoringBooks(database, clock)
    rescue = Recovery(
        spools,
        spools / "own.db",
        books,
        Receipts(),
        clock,
        longest_life_s=600,
        on_settled=_ignore,
        stored_counts=partial(stored_counts, database),
    )
    assert await rescue.round() == 2
    rows = [
        (e.input_tokens, e.cached_tokens, e.output_tokens, str(e.settled_by), e.finish_reason)
        for e in map(books.got.get, ("req_1", "req_2"))
        if e is not None
    ]
    database.close()
    nothing = (0, 0, 0, "expiry", "expired")
    assert rows == [(10, 4, 7, "receipt", "abort") if stored else nothing, nothing]
    assert not list(spools.glob("dead*"))
