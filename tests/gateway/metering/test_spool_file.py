"""The spool file's own promises: how it is opened, what it counts, and what its records name."""

import asyncio
import errno
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from core import metrics
from core.batches.jobs import LineResult
from core.errors import Unavailable
from core.events import ModerationEvent
from core.settings import Settings
from gateway.metering import shipper as shipper_module
from gateway.metering import spool_watch
from gateway.metering.shipper import Shipper
from gateway.metering.spool import Spool, SpoolFile, count_parked, read_outbox
from gateway.metering.spool_records import decode_outbox, request_id_of
from gateway.metering.spool_statements import (
    delete_shipped,
    insert_answer,
    insert_moderation,
    insert_opened,
    insert_receipt,
    move_to_outbox,
    move_to_parked,
)
from tests.gateway.metering.spool_rows import NOW, closed, opened
from tests.gateway.metering.test_spool import Books, EngineCount


def test_the_file_is_a_write_ahead_log_that_the_shipper_checkpoints(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path / "data" / "spool" / "1.db")
    names = ("journal_mode", "synchronous", "wal_autocheckpoint")
    found = [file.connection.execute(f"pragma {name}").fetchone()[0] for name in names]
    assert found == ["wal", 1, 0]
    assert (tmp_path / "data" / "spool" / "1.db.lock").stat().st_mode & 0o777 == 0o600
    file.close()
    again = SpoolFile(file.path)
    assert again.is_empty()
    again.close(remove=True)
    assert list(file.path.parent.iterdir()) == []


@pytest.mark.parametrize("fault", ["not a directory", "no database"])
def test_a_file_that_cannot_be_opened_holds_no_lock(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "1.db"
    if fault == "no database":
        path.write_bytes(b"this is no database" * 100)
    else:
        path.mkdir()
    for _ in range(2):  # the second would find the lock of the first
        with pytest.raises(sqlite3.Error):
            SpoolFile(path)


def test_the_count_of_the_outbox_follows_every_commit(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path / "1.db")
    file.commit([insert_opened(opened("req_1")), insert_opened(opened("req_2"))])
    assert (file.waiting, file.is_empty()) == (0, False)
    for name in ("req_1", "req_2", "req_3"):
        file.commit(move_to_outbox(closed(name)))
    assert file.waiting == 3
    with pytest.raises(sqlite3.IntegrityError):  # one statement fails: none counts
        file.commit([*move_to_outbox(closed("req_4")), *[insert_opened(opened("req_5"))] * 2])
    assert (file.waiting, file.open_requests()) == (3, [])
    file.commit(move_to_parked(2, "why"))
    assert (file.waiting, file.parked()) == (2, 1)
    file.commit([delete_shipped(3)])
    assert (file.waiting, file.is_empty()) == (0, False), "a parked record is kept"
    file.close()
    again = SpoolFile(tmp_path / "1.db")
    again.commit(move_to_outbox(closed("req_6")))
    again.close()
    assert SpoolFile(tmp_path / "1.db").waiting == 1


def test_records_of_every_topic_are_read_in_order_and_name_their_request(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path / "1.db")
    verdict = ModerationEvent(
        *("req_m", "org_a", "proj_a", "key_a", NOW, "input", "block", "policy_1", "sha"), (), {}
    )
    count = EngineCount("req_r", "engine", 1, 0, 1, NOW)
    answer = LineResult(7, True, "{}", 3, 2, 1)
    file.commit([*move_to_outbox(closed("req_u")), insert_receipt(count)])
    file.commit([insert_moderation([verdict]), insert_answer("batch_1", answer)])
    rows = read_outbox(file.connection, 10)
    batch = decode_outbox(rows)
    assert ([each.request_id for each in batch.usage], batch.receipts) == (["req_u"], [count])
    assert (batch.moderation, batch.lines) == ([verdict], [("batch_1", answer)])
    assert request_id_of("moderation", b"\x90") == "", "no events"
    assert request_id_of("opened", insert_opened(opened("req_o")).values[1]) == "req_o"  # type: ignore[arg-type]
    named = [request_id_of(topic, body) for _, topic, body in rows]
    assert named == ["req_u", "req_r", "req_m", ""]
    assert request_id_of("usage", b"\xc1") == ""
    assert [row[0] for row in read_outbox(file.connection, 2, after=1)] == [2, 3]
    file.close()


async def test_catching_up_ships_what_is_still_in_memory(tmp_path: Path) -> None:
    spool, books = Spool(SpoolFile(tmp_path / "1.db")), Books()
    spool.bind(asyncio.get_running_loop())
    shipper = Shipper(spool, books, pause_s=0.0)
    shipper.start()
    spool.close_soon(closed("req_1"))
    await asyncio.wait_for(shipper.catch_up(), 30)
    assert list(books.got) == ["req_1"]
    await asyncio.to_thread(shipper.stop, 30)
    assert not shipper._thread.is_alive()
    spool.file.close()


async def test_while_the_database_is_down_the_metrics_tell(tmp_path: Path) -> None:
    spool, books = Spool(SpoolFile(tmp_path / "1.db")), Books()
    spool.bind(asyncio.get_running_loop())
    books.down = True
    for number in range(7):
        spool.file.commit(move_to_outbox(closed(f"req_{number}")))
    metrics.spool_waiting.set(0)
    shipper = Shipper(spool, books, pause_s=0.0)
    shipper.start()
    async with asyncio.timeout(30):
        while metrics.spool_waiting._value.get() != 7:
            await asyncio.sleep(0.005)
    await asyncio.to_thread(shipper.stop, 30)
    assert not books.got
    spool.file.close()


async def test_a_spool_without_a_loop_keeps_what_the_disk_refused_for_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(SpoolFile(tmp_path / "1.db"))
    plain = spool.file.append

    def _full(_statements: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool.file, "append", _full)
    await spool.close(closed("req_1"))
    monkeypatch.setattr(spool.file, "append", plain)
    spool.arrived.clear()
    spool.flush()
    assert spool.file.waiting == 1 and spool.arrived.is_set()
    spool.flush()
    assert spool.file.waiting == 1, "what was committed is not committed again"
    with pytest.raises(RuntimeError, match="not bound"):
        spool.park(1, "why")
    spool.file.close()


async def test_a_refused_commit_is_tried_again_by_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class _Loop:
        def __init__(self) -> None:
            self.later: list[tuple[float, Callable[[], None]]] = []

        def call_later(self, seconds: float, call: Callable[[], None]) -> None:
            self.later.append((seconds, call))

    spool, loop = Spool(SpoolFile(tmp_path / "1.db")), _Loop()
    await spool.open(opened("req_1"))
    spool._loop = loop  # type: ignore[assignment]
    plain = spool.file.append

    def _full(_statements: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool.file, "append", _full)
    spool._batch = [insert_opened(opened("req_1"))]  # of a client that gets the error
    spool.flush()
    assert not loop.later, "there is nothing to be kept"
    spool._batch = [insert_opened(opened("req_1")), *move_to_outbox(closed("req_1"))]
    spool.flush()
    for _ in range(50):  # clients that come meanwhile
        spool._batch = [insert_opened(opened("req_2"))]
        spool.flush()
    [(seconds, again)] = loop.later
    assert seconds == 1.0, "and one attempt a second, not one for each that failed"
    again()
    assert len(loop.later) == 2, "the disk is still full"
    monkeypatch.setattr(spool.file, "append", plain)
    loop.later[1][1]()
    assert (spool.file.waiting, spool.file.open_requests()) == (1, [])
    spool.file.close()


def test_a_command_waits_for_the_shipper_and_no_longer_than_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SpoolFile(tmp_path / "spool" / "1.db")
    file.commit(move_to_outbox(closed("req_1")))
    waits: list[float] = []

    def _sleep(seconds: float) -> None:
        waits.append(seconds)
        file.commit([delete_shipped(1)])

    monkeypatch.setattr(spool_watch.time, "sleep", _sleep)
    assert spool_watch.wait_until_shipped(Settings(data_dir=tmp_path)).unshipped == 0
    assert len(waits) == 1
    file.close()


async def test_with_less_room_than_the_reserve_only_admitted_requests_are_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(SpoolFile(tmp_path / "1.db", reserve=2**62))
    for _ in range(3):
        with pytest.raises(Unavailable) as caught:
            await spool.open(opened("req_1"))
    assert caught.value.code == "spool_unavailable" and spool.file.open_requests() == []
    assert [each.message.partition(" is ")[2] for each in caplog.records] == [
        "full: requests are refused"
    ]
    await spool.close(closed("req_2"))
    assert spool.file.waiting == 1
    spool.file.close()


@pytest.mark.parametrize(("left", "shrinks"), [(10, True), (1400, False)])
def test_what_an_outage_took_of_the_disk_is_given_back(
    tmp_path: Path, left: int, shrinks: bool
) -> None:
    file = SpoolFile(tmp_path / "1.db", reserve=2**16)
    file.commit([each for i in range(2000) for each in move_to_outbox(closed(f"req_{i}"))])
    file.commit([delete_shipped(2000 - left)])
    file.connection.execute("pragma wal_checkpoint(passive)")
    before = file.path.stat().st_size
    file.shrink()
    assert (file.path.stat().st_size < before / 10) is shrinks
    assert len(read_outbox(file.connection, 5000)) == left
    file.shrink()
    file.close()


async def test_a_disk_that_cannot_be_read_for_a_while_does_not_end_the_shipper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, books = Spool(SpoolFile(tmp_path / "1.db")), Books()
    spool.bind(asyncio.get_running_loop())
    asked = threading.Event()

    def _fails(_connection: object) -> int:
        asked.set()
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(shipper_module, "count_parked", _fails)
    shipper = Shipper(spool, books, pause_s=0.0)
    shipper.start()
    assert await asyncio.to_thread(asked.wait, 60)
    monkeypatch.setattr(shipper_module, "count_parked", count_parked)
    await spool.close(closed("req_1"))
    async with asyncio.timeout(60):
        while not books.got:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(shipper.stop, 30)
    spool.file.close()
