"""Shipping step by step, without threads: batches, refusals, the helper's protocol, and metrics."""

import io
import json
import logging
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from core import metrics
from core.database import Database
from core.settings import Settings
from gateway.metering import batch_shippers, parked_records, shipper, spool_watch
from gateway.metering.batch_shippers import InlineShipper, ShippedBatch, refused_rows
from gateway.metering.parked_records import brief
from gateway.metering.shipper import Shipper, ship_file
from gateway.metering.spool import Spool, SpoolFile, connect
from gateway.metering.spool_records import OutboxBatch
from gateway.metering.spool_statements import (
    insert_moderation,
    insert_opened,
    insert_receipt,
    move_to_outbox,
    move_to_parked,
    park_opened,
)
from tests.gateway.metering.spool_rows import NOW, closed, opened
from tests.gateway.metering.test_batch_shippers import booked, event
from tests.gateway.metering.test_refusals import price_of
from tests.gateway.metering.test_spool import Books, EngineCount


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SpoolFile]:
    made = SpoolFile(tmp_path / "spool" / "1.db")
    yield made
    made.close()


def fill(file: SpoolFile, count: int) -> None:
    for number in range(count):
        file.commit(move_to_outbox(closed(f"req_{number}")))


class Recording(Books):
    """Remembers the requests of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[str]] = []

    def record(self, batch: OutboxBatch) -> None:
        self.calls.append([each.request_id for each in batch.usage])
        super().record(batch)


def test_nothing_to_ship_is_an_empty_batch(file: SpoolFile) -> None:
    assert InlineShipper(file.connection, Books()).ship(0, 10) == ShippedBatch(0, 0, 0, 0.0)


def test_a_batch_names_its_rows_and_counts_records_of_every_kind(file: SpoolFile) -> None:
    fill(file, 2)
    file.commit([insert_receipt(EngineCount("req_0", "engine", 1, 0, 1, NOW))])
    file.commit([insert_moderation(())])
    inline = InlineShipper(file.connection, Books())
    batch = inline.ship(0, 10)
    assert (batch.first, batch.last, batch.rows, batch.refused) == (1, 4, 3, "")
    assert 0 <= batch.cpu_s < 60
    assert inline.ship(1, 1).last == 2


def test_only_the_rows_that_are_refused_singly_are_named(file: SpoolFile) -> None:
    fill(file, 4)
    file.commit(move_to_parked(2, "gone meanwhile"))
    books = Books()
    books.refused = {"req_2"}
    inline = InlineShipper(file.connection, books)
    whole = inline.ship(0, 10)
    assert (whole.first, whole.last, whole.refused) == (1, 4, "this event makes no sense")
    assert list(refused_rows(inline, whole)) == [(3, "this event makes no sense")]
    assert sorted(books.got) == ["req_0", "req_3"]


def test_an_adopted_files_outbox_is_shipped_whole_in_batches(
    file: SpoolFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipper, "BATCH", 2)
    fill(file, 5)
    books = Recording()
    books.refused = {"req_3"}
    # Of the refused batch the good row is stored when it comes alone.
    assert ship_file(file.connection, books, file.commit) == 2 + 2 + 1
    assert sorted(books.got) == ["req_0", "req_1", "req_2", "req_4"]
    assert (file.waiting, file.parked()) == (0, 1)


class Counting(InlineShipper):
    """In place of the helper process."""

    calls = 0

    def ship(self, after: int, limit: int) -> ShippedBatch:
        self.calls += 1
        return super().ship(after, limit)


def drained(
    file: SpoolFile, books: Books, monkeypatch: pytest.MonkeyPatch, *, whole: bool
) -> tuple[Shipper, Counting]:
    monkeypatch.setattr(shipper, "BATCH", 2)
    monkeypatch.setattr(shipper, "_MANY", 2)
    with closing(connect(file.path)) as reader:
        helper = Counting(reader, books)
        made = Shipper(Spool(file), books, helper)  # type: ignore[arg-type]
        made.drain(reader, whole=whole)
    return made, helper


@pytest.mark.parametrize(("whole", "calls"), [(False, 2), (True, 3)])
def test_a_full_batch_starts_the_helper_and_an_incomplete_one_ends_the_round(
    file: SpoolFile, monkeypatch: pytest.MonkeyPatch, whole: bool, calls: int
) -> None:
    fill(file, 5)
    books = Recording()
    made, helper = drained(file, books, monkeypatch, whole=whole)
    assert books.calls == [["req_0", "req_1"], ["req_2", "req_3"], ["req_4"]]
    assert helper.calls == calls
    assert made._shipped == 5


def test_little_work_starts_no_helper(file: SpoolFile, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(file, 1)
    assert drained(file, Books(), monkeypatch, whole=True)[1].calls == 0


def test_the_metrics_say_how_many_records_wait_and_since_when(
    file: SpoolFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Shipper(Spool(file), Books())
    monkeypatch.setattr(shipper.time, "monotonic", lambda: 100.0)
    made._update_metrics(file.connection)
    assert [each._value.get() for each in (metrics.spool_waiting, metrics.spool_age_seconds)] == [
        *(0, 0),
    ]
    fill(file, 3)
    file.commit(move_to_parked(3, "no sense"))
    made._update_metrics(file.connection)
    monkeypatch.setattr(shipper.time, "monotonic", lambda: 107.0)
    made._update_metrics(file.connection)
    named = (metrics.spool_waiting, metrics.spool_parked, metrics.spool_age_seconds)
    assert [each._value.get() for each in named] == [2, 1, 7.0]


def test_an_error_is_told_in_its_first_line() -> None:
    assert brief(ValueError("  first\nsecond")) == "first"
    assert brief(ValueError("x" * 400)) == "x" * 300


def test_the_helper_answers_each_line_until_its_input_ends(
    tmp_path: Path,
    file: SpoolFile,
    sqlite_database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    price = price_of(sqlite_database)
    for name in ("req_1", "req_2", "req_3"):
        file.commit(move_to_outbox(event(name, price)))
    config = {"spool": str(file.path), "database": sqlite_database.url}
    lines = [{**config, "level": "error", "format": "console"}, [0, 2], [2, 5], [3, 5], [0]]
    given = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    answers = io.TextIOWrapper(io.BytesIO())
    ignored: list[tuple[int, object]] = []
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    monkeypatch.setattr(sys, "stdout", answers)
    monkeypatch.setattr(signal, "signal", lambda number, action: ignored.append((number, action)))
    monkeypatch.setattr(batch_shippers.logs, "configure", lambda level, style: None)
    with pytest.raises(ValueError, match="unpack"):
        batch_shippers.main()
    assert ignored == [(signal.SIGINT, signal.SIG_IGN), (signal.SIGTERM, signal.SIG_IGN)]
    answers.seek(0)
    rows = [json.loads(line) for line in answers]
    assert [(each["first"], each["last"], each["rows"]) for each in rows] == [
        *((1, 2, 2), (3, 3, 1), (0, 0, 0)),
    ]
    assert booked(sqlite_database) == ["req_1", "req_2", "req_3"]


def test_the_helper_tells_a_temporary_failure_and_goes_on() -> None:
    class _Failing:
        calls = 0

        def ship(self, after: int, limit: int) -> ShippedBatch:
            self.calls += 1
            if self.calls == 1:
                raise sqlite3.OperationalError("database is locked\nmore")
            return ShippedBatch(1, 2, 2, 0.5, "why")

    answers: list[bytes] = []
    lines = iter([b"[0, 5]\n", b"[0, 5]\n", b""])
    batch_shippers.serve(lambda: next(lines), answers.append, _Failing())
    assert [json.loads(each) for each in answers] == [
        {"failed": "database is locked"},
        {"first": 1, "last": 2, "rows": 2, "cpu_s": 0.5, "refused": "why"},
    ]


def test_a_permanent_error_while_parking_parks_in_the_file_and_a_temporary_one_is_raised(
    file: SpoolFile,
) -> None:
    fill(file, 1)

    class _Parking(Books):
        error: Exception | None = None

        def park(self, batch: OutboxBatch, reason: str) -> None:
            self.parked = (batch.usage[0].request_id, reason)
            if self.error is not None:
                raise self.error

    books = _Parking()
    books.refused = {"req_0"}
    inline = InlineShipper(file.connection, books)
    assert inline.ship(0, 10).refused == ""
    assert books.parked == ("req_0", "this event makes no sense")
    books.error = ValueError("not this either")
    assert inline.ship(0, 10).refused == "this event makes no sense"
    books.error = sqlite3.OperationalError("database is locked")
    with pytest.raises(sqlite3.OperationalError):
        inline.ship(0, 10)


def parked_file(tmp_path: Path) -> Path:
    """Two parked records and an open request, with numbers 1 to 3."""
    made = SpoolFile(tmp_path / "parked" / "1.db")
    fill(made, 2)
    made.commit([insert_opened(opened("req_o"))])
    made.commit([*move_to_parked(1, "first"), *move_to_parked(2, "second")])
    made.commit(park_opened("req_o", "third"))
    made.close()
    return made.path.parent


def listed(directory: Path) -> list[tuple[str, int, str, str, str]]:
    found = parked_records.parked_records(directory)
    return [(each.file, each.seq, each.topic, each.request_id, each.reason) for each in found]


def test_parked_records_are_listed_and_released_singly_and_open_requests_wait(
    tmp_path: Path,
) -> None:
    directory, books = parked_file(tmp_path), Recording()
    assert listed(directory) == [
        ("1.db", 1, "usage", "req_0", "first"),
        ("1.db", 2, "usage", "req_1", "second"),
        ("1.db", 3, "opened", "req_o", "third"),
    ]
    books.refused = {"req_0"}
    assert parked_records.release(directory, books) == 1
    assert books.calls == [["req_0"], ["req_1"]] and sorted(books.got) == ["req_1"]
    assert listed(directory) == [
        ("1.db", 1, "usage", "req_0", "this event makes no sense"),
        ("1.db", 3, "opened", "req_o", "third"),
    ]
    books.refused, books.down = set(), True
    with pytest.raises(Exception, match="the server is away"):
        parked_records.release(directory, books)
    books.down = False
    assert parked_records.release(directory, books) == 1
    assert [each[1] for each in listed(directory)] == [3]


def test_one_parked_record_is_dropped_by_its_name_and_no_file_outside(tmp_path: Path) -> None:
    directory = parked_file(tmp_path)
    assert parked_records.drop(directory, "1.db", 2) is True
    assert parked_records.drop(directory, "1.db", 2) is False
    assert parked_records.drop(directory, "gone.db", 1) is False
    assert parked_records.drop(directory / "below", "../1.db", 1) is False
    assert [each[1] for each in listed(directory)] == [1, 3]


def test_parked_records_go_back_where_they_came_from(tmp_path: Path) -> None:
    directory = parked_file(tmp_path)
    adopted = SpoolFile(directory / "1.db")
    adopted.commit([insert_opened(opened("req_u"))])
    adopted.connection.execute("update opened set body = x'c1'")
    assert adopted.open_requests() == []  # parked, as number 4
    parked_records.retry_parked(adopted)
    assert (adopted.waiting, adopted.parked()) == (2, 1)
    assert [each.request_id for each in adopted.open_requests()] == ["req_o"]
    assert [each[:4] for each in listed(directory)] == [("1.db", 4, "opened", "")]
    adopted.close()


def test_spools_are_counted_and_their_requests_known(tmp_path: Path) -> None:
    directory = parked_file(tmp_path)
    settings = Settings(data_dir=tmp_path)
    directory.rename(tmp_path / "spool")
    assert spool_watch.spool_counts(settings) == spool_watch.SpoolCounts(0, 0, 3, None)
    for name, count in (("2", 1), ("3", 2)):
        made = SpoolFile(tmp_path / "spool" / f"{name}.db")
        fill(made, count)
        made.commit([insert_opened(opened(f"req_open{name}"))])
        made.close()
    counted = spool_watch.spool_counts(settings)
    assert (counted.running, counted.unshipped, counted.parked) == (2, 3, 3)
    changed = [(tmp_path / "spool" / f"{name}.db").stat().st_mtime for name in "23"]
    assert counted.oldest == min(changed)
    assert spool_watch.requests_in_spools(settings) == {
        *("req_0", "req_1", "req_o", "req_open2", "req_open3"),
    }
    assert spool_watch.wait_until_shipped(settings, 0.0) == counted


def test_a_file_that_is_no_database_is_left_out_of_the_counts(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "0.db").write_bytes(b"this is no database" * 100)
    made = SpoolFile(tmp_path / "spool" / "1.db")
    fill(made, 1)
    assert spool_watch.spool_counts(settings).unshipped == 1
    assert spool_watch.requests_in_spools(settings) == {"req_0"}
    made.close()


def test_while_the_database_is_away_the_pauses_double_up_to_a_bound(
    file: SpoolFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shipper, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(shipper, "LONGEST_PAUSE_S", 0.05)
    fill(file, 1)
    books = Books()
    books.down = True
    made = Shipper(Spool(file), books)
    waited: list[float] = []

    class _Stopping(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            if len(waited) == 6:
                self.set()
            return self.is_set()

    made._stopping = _Stopping()
    with caplog.at_level(logging.WARNING, "tollhouse.shipper"):
        made.start()
        made._thread.join(30)
    assert not made._thread.is_alive(), "the last attempt fails too, and it ends"
    assert waited == pytest.approx([0.01, 0.02, 0.04, 0.05, 0.05, 0.05])
    assert "the server is away" in caplog.text and file.waiting == 1


def test_a_process_that_ends_without_stopping_its_shipper_is_not_held_by_it(
    file: SpoolFile,
) -> None:
    made = Shipper(Spool(file), Books(), pause_s=0.01)
    made.start()
    (thread,) = [each for each in threading.enumerate() if each.name == "tollhouse-shipper"]
    assert thread.daemon
    made.stop()
    assert not thread.is_alive()
