"""What streams had delivered when their process was killed, and what recovery makes of it."""

import os
import signal
import subprocess
import sys
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import pytest

from core.clock import FakeClock
from engine.protocol import FinishReason
from gateway.metering.delivered import DeliveredCounts, delivered_path, read_delivered
from gateway.metering.recovery import event_of_receipt
from gateway.metering.spool import Spool, SpoolFile
from gateway.metering.spool_statements import insert_opened
from tests.gateway.answers.test_delivery import Case, Generated, Replica, Route, said
from tests.gateway.metering.spool_rows import NOW, opened
from tests.gateway.metering.test_spool import Books, Receipts, receipt, recovery

ID = "req_01m8fv03knscw43t4zxzdtrnsh"
KILLED = """
import os, signal, sys
from pathlib import Path
from gateway.metering.delivered import DeliveredCounts
counts = DeliveredCounts(Path(sys.argv[1]))
streams = [counts.begin(f"req_{number}") for number in range(2_000)]
for number, stream in enumerate(streams):
    stream.note(number * 7 + 1)
for stream in streams[::2]:
    stream.end()
counts.begin("req_again").note(5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_the_counts_of_its_running_streams(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "1.db")], cwd=os.getcwd())
    assert done.returncode == -signal.SIGKILL
    running = {f"req_{number}": number * 7 + 1 for number in range(1, 2_000, 2)}
    assert read_delivered(tmp_path / "1.db") == running | {"req_again": 5}


def test_a_file_that_was_never_made_says_nothing(tmp_path: Path) -> None:
    assert read_delivered(tmp_path / "1.db") is None
    DeliveredCounts(tmp_path / "1.db").close()
    assert read_delivered(tmp_path / "1.db") == {}


def test_without_room_on_the_disk_streams_run_without_a_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def _full(*_given: Any) -> None:
        raise OSError(28, "No space left on device")

    counts = DeliveredCounts(tmp_path / "1.db")
    monkeypatch.setattr(os, "posix_fallocate", _full)
    assert counts.begin(ID) is None
    assert counts.begin("x" * 57) is None
    counts.close()


def test_an_id_is_read_back_whole(tmp_path: Path) -> None:
    counts = DeliveredCounts(tmp_path / "1.db")
    for name in (ID, "r", "x" * 56):
        found = counts.begin(name)
        assert found is not None
        found.note(2**40)
    assert read_delivered(tmp_path / "1.db") == dict.fromkeys((ID, "r", "x" * 56), 2**40)
    counts.close()


async def test_the_file_goes_with_the_spool(tmp_path: Path) -> None:
    spool = Spool(SpoolFile(tmp_path / "1.db"))
    assert delivered_path(tmp_path / "1.db").stat().st_mode & 0o777 == 0o600
    spool.file.close(remove=True)
    assert list(tmp_path.iterdir()) == []


# Tokens in the last frame that left the process before the kill, finish reason of the receipt ->
# status, finish reason, input, output, waived, quantity and payer. The receipt has 10 and 20 tokens.
LOST, ABORT, LENGTH = "gateway_lost", FinishReason.ABORT, FinishReason.LENGTH
TABLE = [
    (None, LENGTH, (200, "length", 10, 20, 0, 1, None)),
    (None, ABORT, (499, "abort", 10, 20, 0, 1, None)),
    (0, LENGTH, (503, LOST, 0, 0, 20, 0, "operator")),
    (0, ABORT, (503, LOST, 0, 0, 20, 0, "operator")),
    (7, ABORT, (503, LOST, 10, 7, 13, 1, None)),
    (7, LENGTH, (503, LOST, 10, 7, 13, 1, None)),
    (20, ABORT, (503, LOST, 10, 20, 0, 1, None)),
    (20, LENGTH, (200, "length", 10, 20, 0, 1, None)),
    (25, LENGTH, (200, "length", 10, 20, 0, 1, None)),
]


@pytest.mark.parametrize(("sent", "reason", "wanted"), TABLE)
def test_what_was_written_is_billed_and_the_rest_is_waived(
    sent: int | None, reason: FinishReason, wanted: tuple[Any, ...]
) -> None:
    found = replaced(
        receipt("req_1"),
        prompt=10,
        cached=0,
        computed=10,
        generated=20,
        delivered=20,
        finish_reason=reason,
    )
    event = event_of_receipt(opened("req_1"), found, NOW, sent)
    assert wanted == (
        *(event.status, event.finish_reason, event.input_tokens, event.output_tokens),
        *(event.waived_tokens, event.quantity, event.paid_by),
    )


async def test_recovery_reads_the_counts_of_the_file_that_it_adopts(tmp_path: Path) -> None:
    spool = Spool(SpoolFile(tmp_path / "dead.db"))
    spool.file.commit([insert_opened(opened(name)) for name in ("req_1", "req_2")])
    count = spool.begin_stream("req_1")
    assert count is not None
    count.note(3)
    spool.file.close()
    books, receipts = Books(), Receipts()
    for name in ("req_1", "req_2"):
        receipts.known[name] = replaced(receipt(name), generated=8, delivered=8)
    assert await recovery(tmp_path, books, receipts, FakeClock(NOW)).round() == 2
    first, second = books.got["req_1"], books.got["req_2"]
    assert (first.output_tokens, first.waived_tokens, first.status) == (3, 5, 503)
    assert (second.output_tokens, second.waived_tokens, second.input_tokens) == (0, 8, 0)


class Count:
    def __init__(self) -> None:
        self.noted, self.ended = list[int](), 0

    def note(self, count: int) -> None:
        self.noted.append(count)

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize(("waiting", "noted"), [(0, [2, 4]), (9, [])])
async def test_a_write_counts_once_the_next_finds_nothing_waiting(
    waiting: int, noted: list[int]
) -> None:
    generated = Generated([said("ab")], [said("cd")], [said("ef")], [said("", "stop")])
    case, count = Case(Route(Replica("one", generated)), stream=True), Count()
    case.meter.begin_stream = lambda: count  # type: ignore[assignment, return-value]
    case.client.unsent = waiting  # type: ignore[attr-defined]
    assert await case.run() == 200
    assert count.noted[: len(noted)] == noted and bool(count.noted) is bool(noted)
    assert count.ended == 1
