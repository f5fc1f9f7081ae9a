"""The log before the spool's tables: what a killed process, a torn write and a full disk leave of it.

What the tables must hold is what `SpoolFile.commit`, which writes them directly, makes of the same
statements.
"""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.settings import Settings
from gateway.metering import spool_log
from gateway.metering.parked_records import parked_records, release, retry_parked
from gateway.metering.shipper import Shipper
from gateway.metering.spool import Spool, SpoolFile, connect
from gateway.metering.spool_log import logs_of
from gateway.metering.spool_statements import (
    INSERT_OUTBOX,
    LOGGED,
    Statement,
    delete_shipped,
    folded,
    insert_opened,
    insert_receipt,
    move_to_outbox,
    move_to_parked,
    update_opened,
)
from gateway.metering.spool_watch import requests_in_spools, spool_counts
from tests.gateway.metering.spool_rows import NOW, closed, opened
from tests.gateway.metering.test_spool import Books, EngineCount, as_if_killed

ROOT = Path(__file__).parents[3]


def tables(file: SpoolFile) -> list[list[tuple[object, ...]]]:
    names = ("opened", "outbox", "parked")
    return [file.connection.execute(f"select * from {name}").fetchall() for name in names]


def log_of(file: SpoolFile) -> Path:
    [found] = file.path.parent.glob(f"{file.path.name}.log-*")
    return found


def statement(act: tuple[str, int]) -> list[Statement]:
    kind, number = act
    name = f"req_{number}"
    if kind == "open":
        return [insert_opened(opened(name))]
    if kind == "again":
        return [update_opened(opened(name))]
    if kind == "close":
        return move_to_outbox(closed(name))
    if kind == "receipt":
        return [insert_receipt(EngineCount(name, "engine", 1, 0, 1, NOW))]
    return [delete_shipped(number)] if kind == "shipped" else move_to_parked(number, "why")


acts = st.tuples(
    st.sampled_from(["open", "again", "close", "close", "receipt", "shipped", "park"]),
    st.integers(1, 6),
)


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.lists(acts, max_size=6) | st.just("fold"), max_size=10))
def test_a_folded_log_is_what_commits_would_have_made(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[tuple[str, int]] | str]
) -> None:
    folder = tmp_path_factory.mktemp("spools")
    logged, plain = SpoolFile(folder / "spool" / "a.db"), SpoolFile(folder / "plain" / "a.db")
    known: set[str] = set()
    for step in steps:
        if step == "fold":
            logged.fold()
            continue
        written: list[Statement] = []
        for act in step:
            made = statement(act)  # type: ignore[arg-type]
            if made[0].is_opening and made[0].values[0] in known:
                continue  # an id is opened once
            known.update(str(each.values[0]) for each in made if each.is_opening)
            written += made
        logged.append(written)
        plain.commit(written)
        counts = spool_counts(Settings(data_dir=folder))
        expected = [len(rows) for rows in tables(plain)]
        assert [counts.running, counts.unshipped, counts.parked] == expected
    listed = requests_in_spools(Settings(data_dir=folder))
    left = as_if_killed(logged, folder / "left")
    assert tables(left) == tables(plain) == tables(logged)
    assert left.waiting == logged.waiting == plain.waiting == len(tables(plain)[1])
    held = {row[0] for row in tables(plain)[0]}
    assert held <= listed
    for file in (left, logged, plain):
        file.close()
    assert not list(folder.rglob("*.log-*"))


def test_rows_of_any_number_are_inserted_in_order_by_a_handful_of_statements() -> None:
    """A connection keeps its last statements prepared: one for each number of rows takes megabytes."""
    texts: set[str] = set()
    for count in range(600):
        operations = [(LOGGED.index(INSERT_OUTBOX), (n, "usage", b"x")) for n in range(count)]
        found = list(folded(operations))
        assert [value for _, values in found for value in values[::3]] == list(range(count))
        assert all(sql.count("(?, ?, ?)") * 3 == len(values) for sql, values in found)
        texts.update(sql for sql, _ in found)
    assert len(texts) == 9


def test_a_torn_end_is_not_read_wherever_it_is_torn(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path / "a.db")
    file.append([insert_opened(opened("req_1"))])
    whole = log_of(file).stat().st_size
    file.append([*move_to_outbox(closed("req_1")), insert_opened(opened("req_2"))])
    written = log_of(file).read_bytes()
    ends = {*range(whole, whole + 10, 3), *range(whole, len(written), 211), len(written) - 1}
    for end in ends:
        left = tmp_path / f"left{end}"
        SpoolFile(left / "a.db").close()
        (left / log_of(file).name).write_bytes(written[:end])
        adopted = SpoolFile(left / "a.db")
        assert [each.request_id for each in adopted.open_requests()] == ["req_1"]
        assert adopted.waiting == 0
        adopted.append([insert_opened(opened("req_3"))])
        assert len(adopted.open_requests()) == 2
        adopted.close()
    for place in range(whole, len(written), 173):
        left = tmp_path / f"flipped{place}"
        SpoolFile(left / "a.db").close()
        turned = bytes((written[place] ^ 0x10,))
        (left / log_of(file).name).write_bytes(written[:place] + turned + written[place + 1 :])
        adopted = SpoolFile(left / "a.db")
        assert [each.request_id for each in adopted.open_requests()] == ["req_1"]
        adopted.close()
    file.close()


def test_what_is_behind_a_damaged_frame_is_kept_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, ends = SpoolFile(tmp_path / "a.db"), list[int]()
    for number in range(3):
        file.append([insert_opened(opened(f"req_{number}"))])
        ends.append(log_of(file).stat().st_size)
    written = bytearray(log_of(file).read_bytes())
    written[ends[0] + 20] ^= 0x10  # in the second of three frames
    left = tmp_path / "left"
    SpoolFile(left / "a.db").close()
    (left / log_of(file).name).write_bytes(written)
    for _ in range(2):  # again: a damaged log is not read twice
        adopted = SpoolFile(left / "a.db")
        assert [each.request_id for each in adopted.open_requests()] == ["req_0"]
        adopted.append([insert_opened(opened("later"))])
        adopted.commit([move_to_outbox(closed("later"))[0]])
        adopted.close()
    [kept] = left.glob("*.damaged-*")
    assert kept.read_bytes() == written
    said = [each for each in caplog.messages if str(kept) in each]
    assert said == [
        f"{ends[2] - ends[0]} bytes at the end of a log cannot be read; it is kept: {kept}"
    ]
    file.close()


@pytest.mark.parametrize("cut_fails", [False, True])
def test_a_disk_that_fills_in_the_middle_of_a_write_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_fails: bool
) -> None:
    file, write, cut = SpoolFile(tmp_path / "a.db"), os.write, os.ftruncate
    file.append([insert_opened(opened("req_1"))])

    def _fails(_file: int, _size: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(spool_log.os, "write", lambda to, data: write(to, data[:20]))
    if cut_fails:
        monkeypatch.setattr(spool_log.os, "ftruncate", _fails)
    with pytest.raises(OSError, match="gone" if cut_fails else "space"):
        file.append([insert_opened(opened("req_2"))])
    monkeypatch.setattr(spool_log.os, "write", write)
    if cut_fails:  # behind a torn frame nothing would be read
        with pytest.raises(OSError, match="gone"):
            file.append([insert_opened(opened("req_3"))])
        monkeypatch.setattr(spool_log.os, "ftruncate", cut)
    file.append([insert_opened(opened("req_4"))])
    left = as_if_killed(file, tmp_path / "left")
    for each in (left, file):
        assert [record.request_id for record in each.open_requests()] == ["req_1", "req_4"]
        each.close()


def test_a_log_that_was_folded_and_not_removed_is_not_folded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SpoolFile(tmp_path / "a.db")
    file.append([insert_opened(opened("req_1")), *move_to_outbox(closed("req_2"))])

    def _killed(_path: Path, *, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", _killed)
    with pytest.raises(KeyboardInterrupt):
        file.fold()
    monkeypatch.undo()
    file._sealed.clear()  # the process is dead
    file.append([*move_to_outbox(closed("req_3"))])
    left = as_if_killed(file, tmp_path / "left")
    assert [row[0] for row in tables(left)[1]] == [1, 2]
    assert left.waiting == 2 and len(tables(left)[0]) == 1
    left.close()
    file.close()


def test_tables_that_cannot_be_written_keep_the_logs_in_order(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path / "spool" / "a.db")
    file.append([insert_opened(opened("req_1"))])
    other = sqlite3.connect(file.path, isolation_level=None)
    file._connection.execute("pragma busy_timeout = 1")
    other.execute("begin immediate")
    for statements in (move_to_outbox(closed("req_1")), move_to_outbox(closed("req_2"))):
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            file.fold()
        file.append(statements)
    assert len(list(file.path.parent.glob("*.log-*"))) == 3
    counts = spool_counts(Settings(data_dir=tmp_path))
    assert (counts.running, counts.unshipped, file.waiting) == (0, 2, 2)
    other.execute("rollback")
    other.close()
    file.fold()
    assert [len(rows) for rows in tables(file)] == [0, 2, 0]
    assert not list(file.path.parent.glob("*.log-*"))
    file.close()


def test_a_log_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path / "a.db")
    file.append([insert_opened(opened("req_1"))])
    left = tmp_path / "left"
    as_if_killed(file, left).close()
    payload = b"\x91\x92\x63\x90"  # [[99, []]]
    frame = spool_log._HEAD.pack(len(payload), spool_log.zlib.crc32(payload)) + payload
    later = spool_log.log_path(left / "a.db", 9)
    later.write_bytes(frame)
    for _ in range(2):  # the second would find the lock of the first
        with pytest.raises(sqlite3.DatabaseError, match="another version"):
            SpoolFile(left / "a.db")
    assert later.read_bytes() == frame
    file.close()


def test_a_row_that_the_tables_refuse_is_parked_and_the_others_go_on(tmp_path: Path) -> None:
    """Before, the log was tried again for ever, and nothing behind it was shipped."""
    file = SpoolFile(tmp_path / "a.db")
    taken = move_to_outbox(closed("req_0"))[1].values
    other = connect(file.path)
    other.execute("insert into outbox values (1, ?, ?)", taken)
    file.append([insert_opened(opened("req_9")), *move_to_outbox(closed("req_1"))])
    file.append(move_to_outbox(closed("req_2")))
    opened_now, outbox, parked = tables(file)
    assert [row[0] for row in opened_now] == ["req_9"]
    assert [row[0] for row in outbox] == [1, 2] and outbox[0][1:] == taken
    assert [(row[1], "UNIQUE" in str(row[3])) for row in parked] == [("usage", True)]
    assert [each.request_id for each in parked_records(tmp_path)] == ["req_1"]
    assert file.waiting == 1, "the row of somebody else was not counted"
    books = Books()
    assert release(tmp_path, books) == 1 and file.parked() == 0
    file.append(move_to_outbox(closed("req_3")))
    assert [row[0] for row in tables(file)[1]] == [1, 2, 3] and not logs_of(file.path)
    other.close()
    file.close()


def test_an_operation_that_cannot_be_a_row_is_kept_when_it_is_refused(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path / "a.db")
    file.append([insert_opened(opened("req_1")), delete_shipped(2**63)])
    assert [row[0] for row in tables(file)[0]] == ["req_1"]
    [(_, topic, body, reason)] = tables(file)[2]
    assert topic == "operation" and b"\x80\x00\x00" in bytes(body) and "too large" in str(reason)
    assert release(tmp_path, Books()) == 0 and file.parked() == 1
    retry_parked(file)
    assert file.parked() == 1
    file.close()


def test_a_log_that_the_disk_does_not_give_is_named(tmp_path: Path) -> None:
    SpoolFile(tmp_path / "a.db").close()
    spool_log.log_path(tmp_path / "a.db", 9).mkdir()  # as unreadable as a failing disk
    for _ in range(2):  # the second would find the lock of the first
        with pytest.raises(sqlite3.DatabaseError, match=r"its log: .*a\.db"):
            SpoolFile(tmp_path / "a.db")


def test_what_is_appended_while_another_thread_folds_is_there_once(tmp_path: Path) -> None:
    file, done = SpoolFile(tmp_path / "a.db"), threading.Event()

    def _fold() -> None:
        while not done.is_set():
            file.fold()

    thread = threading.Thread(target=_fold)
    thread.start()
    for number in range(3_000):
        name = f"req_{number}"
        file.append([insert_opened(opened(name))])
        file.append(move_to_outbox(closed(name)))
    done.set()
    thread.join()
    assert [row[0] for row in tables(file)[1]] == list(range(1, 3_001))
    assert tables(file)[0] == [] and file.waiting == 3_000
    file.close()


async def test_what_the_tables_hold_is_shipped_though_the_log_cannot_be_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, books = Spool(SpoolFile(tmp_path / "a.db")), Books()
    spool.bind(asyncio.get_running_loop())
    spool.file.commit(move_to_outbox(closed("req_1")))
    spool.file.append(move_to_outbox(closed("req_2")))

    def _full(_number: int, _operations: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(spool.file, "_apply", _full)
    shipper, reader = Shipper(spool, books), connect(spool.file.path)
    with pytest.raises(sqlite3.OperationalError, match="full"):
        shipper.drain(reader, whole=True)
    assert list(books.got) == ["req_1"] and spool.file.waiting == 2
    monkeypatch.undo()
    shipper.drain(reader, whole=True)
    assert list(books.got) == ["req_1", "req_2"]
    reader.close()
    spool.file.close()


async def test_a_shipper_empties_log_and_tables(tmp_path: Path) -> None:
    spool, books = Spool(SpoolFile(tmp_path / "a.db")), Books()
    shipper = Shipper(spool, books, pause_s=0.0)
    spool.bind(asyncio.get_running_loop())
    shipper.start()
    for number in range(450):
        await spool.open(opened(f"req_{number}"))
        spool.close_soon(closed(f"req_{number}"))
    await shipper.catch_up()
    assert len(books.got) == 450
    shipper.stop()
    await asyncio.sleep(0)  # its thread leaves the deletion of what is shipped to the loop
    spool.flush()
    assert spool.file.is_empty() and spool.file.waiting == 0
    spool.file.close(remove=True)
    assert list(tmp_path.iterdir()) == []


_WRITER = """
import sys, threading
from pathlib import Path
from gateway.metering.spool import SpoolFile
from gateway.metering.spool_statements import insert_opened, move_to_outbox
from tests.gateway.metering.spool_rows import closed, opened

file = SpoolFile(Path(sys.argv[1]))

def fold():
    while True:
        file.fold()

threading.Thread(target=fold, daemon=True).start()
number = 0
while True:
    number += 1
    file.append([insert_opened(opened(f"req_{number}"))])
    print("opened", number, flush=True)
    file.append(move_to_outbox(closed(f"req_{number}")))
    print("closed", number, flush=True)
"""


@pytest.mark.parametrize("life_s", [0.05, 0.15, 0.4])
def test_kill_9_loses_nothing_that_was_acknowledged_and_repeats_nothing(
    tmp_path: Path, life_s: float
) -> None:
    command = [sys.executable, "-c", _WRITER, str(tmp_path / "a.db")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [process.stdout.readline()]
    time.sleep(life_s)
    process.send_signal(signal.SIGKILL)
    said += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    pairs = [line.split() for line in said if line.endswith("\n")]
    last = {kind: max(int(n) for k, n in pairs if k == kind) for kind in ("opened", "closed")}
    file = SpoolFile(tmp_path / "a.db")
    rows = [row[0] for row in tables(file)[1]]
    assert rows == list(range(1, len(rows) + 1))
    assert last["closed"] <= len(rows) <= last["closed"] + 1
    running = [int(each.request_id[4:]) for each in file.open_requests()]
    assert running in ([], [len(rows) + 1])
    assert len(rows) + len(running) >= last["opened"]
    file.close()
